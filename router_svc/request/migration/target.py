"""A request on the decode worker that it moves to: it follows the one that the request leaves, then takes over.

Tokens of both go to the client, each position once. If the follower fails, the other worker has gone on meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence

from pdserve.base.errors import Diverged, NoFreeBlocks, PdserveError, TransferError
from pdserve.base.tasks import service_group
from pdserve.base.wire import error_from_wire, tokens_from_wire
from pdserve.peers.seals import Purpose
from pdserve.v1 import common_pb2, decode_pb2
from router_svc.records.events import TookOver
from router_svc.request.calls import DecodeCall, DecodeFailed
from router_svc.request.delivery import ignore_tokens
from router_svc.request.migration.catch_up_policy import CatchUpPolicy
from router_svc.request.running_prompt import RunningPrompt

#: Tokens in one message to a worker that catches up: at most 40 KiB. Workers of the last release hold 64 KiB.
_MAX_PIECE = 8192


class MigrationTarget:
    """One move of a request, over `target`, the call to the worker that it goes to."""

    def __init__(
        self,
        prompt: RunningPrompt,
        source: DecodeCall,
        target: DecodeCall,
        on_caught_up: Callable[[], None],
        *,
        number: int,
    ) -> None:
        """`on_caught_up` is called when `source` is not needed any more. `number`: which move of the request it is."""
        self._number = number
        self._prompt = prompt
        self._output = prompt.output
        self._delivery = prompt.delivery
        self._source = source
        self._target = target
        self._on_caught_up = on_caught_up
        self._policy = CatchUpPolicy({})
        self._stopped: set[int] = set()
        #: The client has tokens that the target was not given.
        self._has_more = asyncio.Event()
        self._giving = asyncio.Lock()
        #: Set with each event of the target.
        self._has_heard = asyncio.Event()
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
        self._delivery.on_tokens = self._came
        try:
            async with service_group() as passing:
                passing.start(self._pass_on(), name="tokens for the worker that a request moves to")
                passing.start(self._require_blocks(), name="blocks for a request that moves")
                await self._run(start)
        except DecodeFailed:
            if self._refusal is None:
                raise
        finally:
            self._delivery.on_tokens = ignore_tokens
        if self._refusal is not None:
            raise DecodeFailed(self._refusal, self._source.worker)

    async def _run(self, start: decode_pb2.DecodeStart) -> None:
        self._lengths = {each.choice_index: len(each.token_ids) for each in start.output}
        self._policy = CatchUpPolicy({choice: length for choice, length in self._lengths.items() if length})
        self._stopped = {each.choice_index for each in start.output if each.is_over}
        sealed = self._prompt.cluster.sealed(Purpose.START, self._target.worker, start)
        await self._target.send(decode_pb2.DecodeRequest(start=sealed))
        while not self._output.is_finished:
            event = await self._target.next_event(self._prompt.cluster.policy.silence)
            self._has_heard.set()
            match event.WhichOneof("event"):
                case "ticket":
                    await self._hand_off(event.ticket.ticket)
                case "started":
                    self._prompt.losses.answered(self._target.worker)
                case "tokens":
                    await self._take(event.tokens.choices)
                case "ended":
                    self._require_finished()
                    return

    async def _require_blocks(self) -> None:
        """Raises `DecodeFailed` when the target has none for the request in time: another worker may have."""
        limit_s = self._prompt.cluster.policy.reserve_timeout_s
        worker_id = self._target.worker.worker_id
        error = NoFreeBlocks(f"Decode worker {worker_id} had no free blocks for a request within {limit_s:g} s.")
        await self._target.milestone(limit_s, error)

    async def take_over(self) -> None:
        """The target goes on alone, behind all that the client has."""
        if not self.has_caught_up:
            self.has_caught_up = True
            self._has_heard.set()  # Waiting pieces go now: this may be the target's reader, for which they wait.
            self._prompt.journal.append(TookOver())
            await self._give()
            self._on_caught_up()

    def handed_off(self, result: decode_pb2.HandedOff) -> None:
        """The source has sent the blocks, or could not, which ends the move. Results of earlier moves are ignored."""
        if result.number not in (0, self._number):
            return
        self.sent_blocks = result.sent_blocks
        if result.HasField("error") and not self.has_caught_up:
            self._refusal = error_from_wire(result.error)
            self._target.close()

    async def _hand_off(self, ticket: decode_pb2.Ticket) -> None:
        lengths = [
            decode_pb2.ChoiceLength(choice_index=choice, num_tokens=length) for choice, length in self._lengths.items()
        ]
        hand_off = decode_pb2.HandOff(ticket=ticket, output=lengths, number=self._number)
        await self._source.send(decode_pb2.DecodeRequest(hand_off=hand_off))

    def _came(self, call: DecodeCall | None) -> None:
        if call is not self._target and not self.has_caught_up:
            self._policy.came(self._output.open_lengths, _now())
            self._has_more.set()

    async def _pass_on(self) -> None:
        """Gives the target each token of the source at once, so that the target's next step starts behind it."""
        while not self.has_caught_up:
            await self._has_more.wait()
            self._has_more.clear()
            await self._give(in_steps=True)

    async def _take(self, tokens: Sequence[common_pb2.ChoiceTokens]) -> None:
        for each in tokens:
            if self._output.contradicts(tokens_from_wire(each)):
                worker = self._target.worker
                raise DecodeFailed(
                    Diverged(f"Decode worker {worker.worker_id} has sampled other tokens than the client has."), worker
                )
        next_indices = {each.choice_index: each.first_index + len(each.token_ids) for each in tokens}
        if self._policy.sampled(next_indices, self._output.open_lengths, _now()):
            await self.take_over()
        await self._delivery.tokens(tokens, self._target)

    async def _give(self, *, in_steps: bool = False) -> None:
        """Gives the target the client's tokens that it lacks, and ends the choices that are over.

        `in_steps`: many tokens go in pieces, each after an event of the target, so that a slow target is not flooded.
        """
        async with self._giving:
            for choice in self._output.over - self._stopped:
                self._stopped.add(choice)
                stop = decode_pb2.StopChoice(choice_index=choice)
                await self._target.send(decode_pb2.DecodeRequest(stop_choice=stop))
            known: list[common_pb2.ChoiceTokens] = []
            for choice, length in self._output.open_lengths.items():
                first = self._policy.give(choice, length)
                known += _pieces(choice, self._output.tokens_of(choice)[first:], first)
            for index, choices in enumerate(_messages(known)):
                if index and in_steps and not self.has_caught_up:
                    await self._has_heard.wait()
                self._has_heard.clear()
                await self._target.send(decode_pb2.DecodeRequest(catch_up=decode_pb2.CatchUp(choices=choices)))

    def _require_finished(self) -> None:
        if not self._output.is_finished:
            worker = self._target.worker
            raise DecodeFailed(
                TransferError(f"Decode worker {worker.worker_id} ended the stream before every choice was complete."),
                worker,
            )


def _pieces(choice: int, tokens: Sequence[int], first: int) -> Iterator[common_pb2.ChoiceTokens]:
    """The tokens from index `first` on, at most `_MAX_PIECE` each."""
    for start in range(0, len(tokens), _MAX_PIECE):
        piece = tokens[start : start + _MAX_PIECE]
        yield common_pb2.ChoiceTokens(choice_index=choice, first_index=first + start, token_ids=piece)


def _messages(pieces: Iterable[common_pb2.ChoiceTokens]) -> Iterator[list[common_pb2.ChoiceTokens]]:
    """Pieces that go together: few tokens of many choices, or one large piece."""
    together: list[common_pb2.ChoiceTokens] = []
    num_tokens = 0
    for piece in pieces:
        if together and num_tokens + len(piece.token_ids) > _MAX_PIECE:
            yield together
            together, num_tokens = [], 0
        together.append(piece)
        num_tokens += len(piece.token_ids)
    if together:
        yield together


def _now() -> float:
    return asyncio.get_running_loop().time()
