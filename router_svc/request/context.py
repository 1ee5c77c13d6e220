"""The state that all steps of one request's saga share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from pdserve.base.errors import PdserveError
from pdserve.base.sampling import ChoiceTokens, FinishReason, TokenLogprobs
from pdserve.base.wire import tokens_from_wire
from pdserve.base.workers import WorkerRecord
from pdserve.v1 import common_pb2, decode_pb2
from router_svc.generation import Generation, is_best_effort
from router_svc.records.journal import Journal
from router_svc.records.resumable import single_tokens
from router_svc.request.calls import DecodeCall, is_gone, is_lost_in_call
from router_svc.request.output import ChoiceDelta, Output, ended_by_stop_string
from router_svc.request.placer import Placer
from router_svc.request.prompt_log import PromptLog
from router_svc.request.quarantine import REFUSED_S, Quarantine
from router_svc.request.stream import DeltaStream
from router_svc.routing.cluster import Cluster, PrefixHashes
from router_svc.routing.in_flight import QueuedPrompt
from router_svc.routing.placement import Placement


def ignore_tokens(call: DecodeCall | None) -> None:
    """No worker follows."""


@dataclass(slots=True, kw_only=True)
class RequestContext:
    """One prompt on its way through the cluster. Owned by its saga."""

    generation: Generation
    #: Hashes of the prompt's blocks.
    hashes: PrefixHashes
    cluster: Cluster
    journal: Journal
    output: Output
    stream: DeltaStream
    #: `generation.sampling` as workers receive it.
    sampling: common_pb2.SamplingParams
    #: Where the prompt's uncached tokens are counted.
    prompt: QueuedPrompt
    #: Which worker is next.
    placer: Placer
    quarantine: Quarantine = field(default_factory=Quarantine)
    #: Where tokens are kept for other routers; None: they are not.
    log: PromptLog | None = None
    #: Times that a decode worker has answered a call.
    decode_answers: int = 0
    #: When the request came, and how many workers it has lost since, whatever ended them.
    started_at: float = field(default_factory=lambda: time.monotonic())
    num_lost: int = 0
    #: Called when the client is about to get tokens, with the call to the decode worker that has sent them.
    on_tokens: Callable[[DecodeCall | None], None] = ignore_tokens
    #: The call to the prefill worker that has handed the prompt over. It retains the blocks until the call ends.
    retained: AsyncExitStack = field(default_factory=AsyncExitStack)
    #: Set once every choice is complete.
    finished: asyncio.Event = field(default_factory=asyncio.Event)

    def prefill_failed(self, placement: Placement, error: PdserveError) -> None:
        """A prefill worker has failed, and the next attempt starts."""
        self.placer.exclude_prefill(placement, error)
        self.journal.retry(error, placement.worker)

    async def note_failure(self, worker: WorkerRecord, error: PdserveError) -> None:
        """Makes other requests avoid a worker that cannot be reached, and counts it against this request.

        Raises the error for the client when the request has lost too many.
        """
        if not is_gone(error):
            return
        self.cluster.directory.mark_lost(worker.worker_id, worker.epoch)
        if not is_lost_in_call(error):
            return
        self.num_lost += 1
        requests = await self.cluster.requests_of_death(worker.worker_id, worker.epoch)
        if requests is not None and self.generation.worker_request_id in requests:
            deaths, name = self.placer.deaths, f"{worker.worker_id}:{worker.epoch}"
            after = deaths.after(worker.tier)
            self.placer.deaths = await self.quarantine.shared(self.generation, after, name, alone=deaths.is_alone)
        deaths = self.placer.deaths
        self.journal.lost_worker(worker, deaths.remark)
        last = f"The last was {worker.tier} worker {worker.worker_id}."
        if deaths.is_over:
            self.quarantine.add(self.generation, time.monotonic())
            raise PdserveError(
                f"The request has ended because {deaths.count} workers have failed by themselves while they "
                f"computed it. {last} The same request is refused for {REFUSED_S / 60:.0f} minutes. See the logs of "
                "these workers."
            ) from error
        limit = self.cluster.policy.max_lost_workers
        if self.num_lost >= limit:
            raise PdserveError(
                f"The request has ended because it has lost {self.num_lost} workers, which is the limit "
                f"(--max-lost-workers). {last} See what ends them, then send the request again."
            ) from error

    def answered(self, worker: WorkerRecord) -> None:
        """The worker has answered a call: other requests may use it, even if it appeared to be gone."""
        self.cluster.directory.mark_alive(worker.worker_id, worker.epoch)
        self.decode_answers += worker.tier == "decode"

    def ref(self) -> common_pb2.RequestRef:
        """The current attempt, as workers know it."""
        return common_pb2.RequestRef(
            request_id=self.generation.worker_request_id,
            attempt=self.journal.record.attempt,
            router_id=self.cluster.in_flight.router_id,
            alone=self.placer.deaths.is_alone,
            best_effort=is_best_effort(self.generation.priority),
            waited_ms=int((time.monotonic() - self.started_at) * 1000),
        )

    def deliver_scores(self, scores: Sequence[TokenLogprobs]) -> None:
        """Sends the log-probabilities of the prompt's tokens to the client: each choice starts with them."""
        choices = range(self.generation.sampling.n)
        deltas = [ChoiceDelta(choice_index=index, text="", prompt_logprobs=tuple(scores)) for index in choices]
        self.stream.push(deltas, first_choice=self.generation.first_choice)

    def deliver_ends(self) -> None:
        """Ends every choice of a request for no tokens."""
        choices = range(self.generation.sampling.n)
        ends = [
            ChoiceTokens(choice_index=index, first_index=0, token_ids=(), finish_reason=FinishReason.LENGTH)
            for index in choices
        ]
        self._pass_on(self.output.push(ends), None)

    async def deliver(self, tokens: Sequence[common_pb2.ChoiceTokens], call: DecodeCall | None) -> None:
        """Sends tokens to the client, and notifies the decode worker of choices that a stop string has ended.

        Whatever interrupts it, the client gets every token that the output has taken.
        """
        chunks = map(tokens_from_wire, tokens)
        deltas: list[ChoiceDelta] = []
        try:
            for chunk in chunks if self.log is None else single_tokens(chunks):
                deltas += self.output.push((chunk,))
        finally:
            self._pass_on(deltas, call)
        await self.stream.wait_for_room()
        if call is not None and not self.output.is_finished:
            for index in ended_by_stop_string(deltas):
                stop = decode_pb2.StopChoice(choice_index=index)
                await call.send(decode_pb2.DecodeRequest(stop_choice=stop))

    def _pass_on(self, deltas: list[ChoiceDelta], call: DecodeCall | None) -> None:
        """New output goes into the record, the log and the stream, in the step in which the output has taken it."""
        if not deltas:
            return
        self.on_tokens(call)
        self.journal.produced(self.output.completion_tokens)
        if self.log is not None:
            worker = None if call is None else call.worker
            self.log.append(deltas, self.journal.record.cached_tokens, worker)
        self.stream.push(deltas, first_choice=self.generation.first_choice)
        if self.output.is_finished:
            self.finished.set()
