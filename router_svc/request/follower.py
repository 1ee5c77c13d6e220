"""A request on the decode worker that it moves to: it follows the one that the request leaves, then takes over.

Tokens of both go to the client, each position once. So nothing stops: if the follower fails, the other one has gone on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pdserve.base.errors import Diverged, PdserveError, TransferError
from pdserve.base.seals import Purpose
from pdserve.base.wire import error_from_wire, tokens_from_wire
from pdserve.v1 import common_pb2, decode_pb2
from router_svc.request.calls import DecodeCall, DecodeFailed
from router_svc.request.context import RequestContext
from router_svc.request.pursuit import Chase, Pursuit


class Follower:
    """One move of a request, over `target`, the call to the worker that it goes to."""

    def __init__(
        self, context: RequestContext, source: DecodeCall, target: DecodeCall, on_caught_up: Callable[[], None]
    ) -> None:
        """`on_caught_up` is called when `source` is not needed any more."""
        self._context = context
        self._output = context.output
        self._source = source
        self._target = target
        self._on_caught_up = on_caught_up
        self._chase = Chase({})
        self._stopped: set[int] = set()
        #: Tokens of every choice that the target was started with.
        self._lengths: dict[int, int] = {}
        #: Whether the target needs no more tokens of others.
        self.has_caught_up = False
        #: What the source has sent.
        self.sent_blocks = 0
        #: Why the source could not send.
        self._refusal: PdserveError | None = None

    async def run(self, start: decode_pb2.DecodeStart) -> None:
        """Returns when every choice is complete. Raises `DecodeFailed`, or an error for the client."""
        try:
            await self._run(start)
        except DecodeFailed:
            if self._refusal is None:
                raise
        if self._refusal is not None:
            raise DecodeFailed(self._refusal, self._source.worker)

    async def _run(self, start: decode_pb2.DecodeStart) -> None:
        self._lengths = {each.choice_index: len(each.token_ids) for each in start.output}
        self._chase = Chase({choice: length for choice, length in self._lengths.items() if length})
        self._stopped = {each.choice_index for each in start.output if each.is_over}
        sealed = self._context.cluster.sealed(Purpose.START, self._target.worker, start)
        await self._target.send(decode_pb2.DecodeRequest(start=sealed))
        while not self._output.is_finished:
            event = await self._target.next_event(self._context.cluster.policy.silence)
            match event.WhichOneof("event"):
                case "ticket":
                    await self._hand_off(event.ticket.ticket)
                case "started":
                    self._context.answered(self._target.worker)
                case "tokens":
                    await self._take(event.tokens.choices)
                case "ended":
                    self._require_finished()
                    return

    async def take_over(self) -> None:
        """The target goes on alone, behind all that the client has."""
        if not self.has_caught_up:
            self.has_caught_up = True
            await self._feed()
            self._on_caught_up()

    def handed_off(self, result: decode_pb2.HandedOff) -> None:
        """The source has sent the blocks, or could not, which ends this."""
        self.sent_blocks = result.sent_blocks
        if result.HasField("error") and not self.has_caught_up:
            self._refusal = error_from_wire(result.error)
            self._target.close()

    async def _hand_off(self, ticket: decode_pb2.Ticket) -> None:
        lengths = [
            decode_pb2.ChoiceLength(choice_index=choice, num_tokens=length) for choice, length in self._lengths.items()
        ]
        hand_off = decode_pb2.HandOff(ticket=ticket, output=lengths)
        await self._source.send(decode_pb2.DecodeRequest(hand_off=hand_off))

    async def _take(self, tokens: Sequence[common_pb2.ChoiceTokens]) -> None:
        for each in tokens:
            if self._output.contradicts(tokens_from_wire(each)):
                worker = self._target.worker
                raise DecodeFailed(
                    Diverged(f"Decode worker {worker.worker_id} has sampled other tokens than the client has."), worker
                )
            self._chase.sampled(each.choice_index, each.first_index + len(each.token_ids))
        await self._context.deliver(tokens, self._target)
        if self.has_caught_up:
            return
        match self._chase.decide(self._output.open_lengths):
            case Pursuit.FEED:
                await self._feed()
            case Pursuit.TAKE_OVER:
                await self.take_over()

    async def _feed(self) -> None:
        """Gives the target what the client has more than it, and ends the choices that are over."""
        for choice in self._output.over - self._stopped:
            self._stopped.add(choice)
            stop = decode_pb2.StopChoice(choice_index=choice)
            await self._target.send(decode_pb2.DecodeRequest(stop_choice=stop))
        known = []
        for choice, length in self._output.open_lengths.items():
            first = self._chase.feed(choice, length)
            tokens = self._output.tokens_of(choice)[first:]
            if tokens:
                known.append(common_pb2.ChoiceTokens(choice_index=choice, first_index=first, token_ids=tokens))
        if known:
            await self._target.send(decode_pb2.DecodeRequest(catch_up=decode_pb2.CatchUp(choices=known)))

    def _require_finished(self) -> None:
        if not self._output.is_finished:
            worker = self._target.worker
            raise DecodeFailed(
                TransferError(f"Decode worker {worker.worker_id} ended the stream before every choice was complete."),
                worker,
            )
