"""Tokens on their way from workers to the client: output, log, record and stream take them in one step."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from pdserve.base.sampling import ChoiceTokens, FinishReason, TokenLogprobs
from pdserve.base.wire import tokens_from_wire
from pdserve.v1 import common_pb2, decode_pb2
from router_svc.generation import Generation
from router_svc.records.journal import Journal
from router_svc.records.resumable import single_tokens
from router_svc.request.calls import DecodeCall
from router_svc.request.output import ChoiceDelta, Output, ended_by_stop_string
from router_svc.request.prompt_log import PromptLog
from router_svc.request.stream import DeltaStream

#: Tokens of more choices take long enough to let other callbacks run before the next ones.
_FEW_CHOICES = 8


def ignore_tokens(call: DecodeCall | None) -> None:
    """For a request that no other worker follows: nothing is done."""


class Delivery:
    """Delivers one prompt's output. Owned by its saga."""

    def __init__(
        self,
        generation: Generation,
        output: Output,
        stream: DeltaStream,
        journal: Journal,
        log: PromptLog | None = None,
    ) -> None:
        """`log`: where tokens are kept for other routers; None: they are not."""
        self._choices = range(generation.sampling.n)
        self._first_choice = generation.first_choice
        self._output = output
        self._stream = stream
        self._journal = journal
        self._log = log
        #: Called when the client is about to get tokens, with the call to the decode worker that has sent them.
        self.on_tokens: Callable[[DecodeCall | None], None] = ignore_tokens
        #: Set once every choice is complete.
        self.finished = asyncio.Event()

    def scores(self, scores: Sequence[TokenLogprobs]) -> None:
        """Delivers the log-probabilities of the prompt's tokens: each choice starts with them."""
        self._push([ChoiceDelta(choice_index=index, text="", prompt_logprobs=tuple(scores)) for index in self._choices])

    def embedding(self, values: bytes) -> None:
        """Delivers the prompt's embedding, little-endian float32."""
        self._push([ChoiceDelta(choice_index=0, text="", embedding=values)])

    def ends(self) -> None:
        """Ends every choice of a request for no tokens."""
        ends = [
            ChoiceTokens(choice_index=index, first_index=0, token_ids=(), finish_reason=FinishReason.LENGTH)
            for index in self._choices
        ]
        self._pass_on(self._output.push(ends), None)

    async def tokens(self, tokens: Sequence[common_pb2.ChoiceTokens], call: DecodeCall | None) -> None:
        """Delivers tokens, and notifies the decode worker of choices that a stop string has ended.

        Whatever interrupts it, the client gets every token that the output has taken.
        """
        chunks = map(tokens_from_wire, tokens)
        deltas: list[ChoiceDelta] = []
        try:
            for chunk in chunks if self._log is None else single_tokens(chunks):
                deltas += self._output.push((chunk,))
        finally:
            self._pass_on(deltas, call)
        await self._stream.wait_for_room()
        if call is not None and not self._output.is_finished:
            for index in ended_by_stop_string(deltas):
                stop = decode_pb2.StopChoice(choice_index=index)
                await call.send(decode_pb2.DecodeRequest(stop_choice=stop))
        if len(tokens) > _FEW_CHOICES:
            await asyncio.sleep(0)  # More may have arrived, which is read without a pause.

    def _pass_on(self, deltas: list[ChoiceDelta], call: DecodeCall | None) -> None:
        if not deltas:
            return
        self.on_tokens(call)
        self._journal.produced(self._output.completion_tokens)
        if self._log is not None:
            worker = None if call is None else call.worker
            self._log.append(deltas, self._journal.record.cached_tokens, worker)
        self._push(deltas)
        if self._output.is_finished:
            self.finished.set()

    def _push(self, deltas: list[ChoiceDelta]) -> None:
        self._stream.push(deltas, first_choice=self._first_choice)
