"""The state that all steps of one request's saga share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace

from pdserve.base.errors import Draining, PdserveError
from pdserve.base.ids import WorkerId
from pdserve.base.layout import KvLayout
from pdserve.base.sampling import ChoiceTokens, FinishReason, TokenLogprobs
from pdserve.base.wire import tokens_from_wire
from pdserve.base.workers import Tier, WorkerRecord
from pdserve.v1 import common_pb2, decode_pb2
from router_svc.generation import Generation, is_best_effort
from router_svc.records.journal import Journal
from router_svc.records.resumable import single_tokens
from router_svc.request.calls import DecodeCall, is_gone, is_lost_in_call
from router_svc.request.output import ChoiceDelta, Output, ended_by_stop_string
from router_svc.request.prompt_log import PromptLog
from router_svc.request.quarantine import REFUSED_S, Deaths, Quarantine
from router_svc.request.recovery import MAX_PREFILL_FAILURES
from router_svc.request.stream import DeltaStream
from router_svc.routing.cluster import Cluster, PrefixHashes
from router_svc.routing.in_flight import QueuedPrompt
from router_svc.routing.incarnation import Incarnation, incarnation_of
from router_svc.routing.placement import Demand, Placement, choose_decode, choose_prefill, has_spare_blocks


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
    #: Leading blocks of the prompt that each worker has cached.
    overlap: dict[WorkerId, int] = field(default_factory=dict)
    #: Workers that have failed in its steps, and where requests go in whose steps too many have.
    deaths: Deaths = field(default_factory=Deaths)
    quarantine: Quarantine = field(default_factory=Quarantine)
    failed_prefill: set[Incarnation] = field(default_factory=set)
    #: Whether it was given the whole context, as the workers had it when it came.
    fills_context: bool = False
    #: Decode worker that gets copies of the request's blocks.
    replica: Incarnation | None = None
    #: Where tokens are kept for other routers; None: they are not.
    log: PromptLog | None = None
    #: Those that have failed the request, live, and do not shut down.
    prefill_failures: int = 0
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

    def choose(
        self, tier: Tier, excluded: Collection[Incarnation], layout: KvLayout | None, numerics: str | None = None
    ) -> Placement | None:
        """The best worker of the tier for this request, or None without a candidate.

        Candidates have KV of this layout and this numerics class. None: whatever it is. A decode worker with copies of
        the request's blocks is the best, unless it is full.
        """
        demand = Demand(
            prompt_tokens=len(self.generation.prompt),
            sequences=self.generation.sampling.n,
            overlap=self.overlap,
            excluded=excluded,
        )
        workers = [each for each in self.cluster.ready(tier, layout) if numerics in (None, each.numerics_class)]
        workers = self._able(workers)
        if tier == "prefill":
            return choose_prefill(workers, demand, self.cluster.in_flight)
        return self._choose_copy(workers, demand) or choose_decode(workers, demand, self.cluster.in_flight)

    def choose_move(
        self, source: WorkerRecord, excluded: Collection[Incarnation], *, needs_room: bool
    ) -> Placement | None:
        """The best other decode worker for a request that leaves `source`.

        With `needs_room`, it also keeps blocks free, so that it does not want to be left itself at once.
        """
        lengths = self.output.open_lengths
        demand = Demand(
            prompt_tokens=len(self.generation.prompt) + sum(lengths.values()),
            sequences=len(lengths),
            overlap=self.overlap,
            excluded={*excluded, incarnation_of(source)},
        )
        candidates = self._able(self.cluster.ready("decode", source.layout))
        candidates = [worker for worker in candidates if worker.numerics_class == source.numerics_class]
        if needs_room:
            candidates = [worker for worker in candidates if has_spare_blocks(worker, demand, self.cluster.in_flight)]
        placement = self._choose_copy(candidates, demand)
        placement = placement or choose_decode(candidates, demand, self.cluster.in_flight)
        return None if placement is None or (needs_room and placement.is_full) else placement

    def is_understood_by(self, worker: WorkerRecord) -> bool:
        """Whether the worker knows all of what the request asks for. An older one would ignore some of it."""
        sampling = self.generation.sampling
        return worker.sampling_version >= sampling.version and (worker.reads_grammars or not sampling.follows_text)

    @property
    def max_len(self) -> int:
        """Tokens of one choice at its end, with the prompt."""
        return len(self.generation.prompt) + self.generation.sampling.max_tokens

    def fits_on(self, worker: WorkerRecord) -> bool:
        """Whether the worker holds all that the request may need of it. A shorter one would cut the answer off."""
        needed = self.max_len if worker.tier == "decode" else len(self.generation.prompt) + 1
        return worker.max_model_len >= needed

    def _able(self, workers: Sequence[WorkerRecord]) -> list[WorkerRecord]:
        """Those that can do what the request asks for, and hold all of it.

        One for the rest of the context, whatever that is, takes shorter ones where there are no others.
        """
        workers = [each for each in workers if self.is_understood_by(each)]
        holding = [each for each in workers if self.fits_on(each)]
        if holding or not self.fills_context:
            return holding
        so_far = len(self.generation.prompt) + max(self.output.open_lengths.values(), default=0)
        return [each for each in workers if each.tier == "decode" and each.max_model_len > so_far]

    def _choose_copy(self, candidates: Sequence[WorkerRecord], demand: Demand) -> Placement | None:
        """The candidate with copies of the request's blocks."""
        copies = [worker for worker in candidates if incarnation_of(worker) == self.replica]
        placement = choose_decode(copies, demand, self.cluster.in_flight)
        if placement is None or placement.is_full:
            return None
        return replace(placement, why=f"has copies of the request's blocks; {placement.why}")

    def choose_prefill(self, decode: WorkerRecord | None) -> Placement | None:
        """The best prefill worker that has not failed this request, for this decode worker if any.

        One of another numerics class is chosen only where none of the decode worker's class is left.
        """
        return self._choose_prefill(self.failed_prefill, self.prefill_failures, decode)

    def choose_without_output(self, version: int) -> Placement | None:
        """The best prefill worker of at least this `SAMPLING_VERSION` that has not failed this request."""
        if not self._may_prefill(self.prefill_failures):
            return None
        workers = [each for each in self.cluster.ready("prefill") if each.sampling_version >= version]
        workers = [each for each in workers if self.fits_on(each)]
        demand = Demand(
            prompt_tokens=len(self.generation.prompt), sequences=1, overlap=self.overlap, excluded=self.failed_prefill
        )
        return choose_prefill(workers, demand, self.cluster.in_flight)

    def has_other_prefill(self, placement: Placement, error: PdserveError, decode: WorkerRecord) -> bool:
        """Whether another prefill worker can take the prompt after this one has failed."""
        failed = self.failed_prefill | {placement.incarnation}
        return self._choose_prefill(failed, self.prefill_failures + _is_fault(error), decode) is not None

    def _choose_prefill(self, failed: set[Incarnation], failures: int, decode: WorkerRecord | None) -> Placement | None:
        if not self._may_prefill(failures):
            return None
        if decode is None:
            return self.choose("prefill", failed, None)
        # It may have changed its role in the meantime, and then takes requests of both tiers by turns.
        failed = failed | {incarnation_of(decode)}
        same = self.choose("prefill", failed, decode.layout, decode.numerics_class)
        return same or self.choose("prefill", failed, decode.layout)

    def _may_prefill(self, failures: int) -> bool:
        # After so many have failed and live, it is the prompt, or the way between the tiers.
        return self.deaths.may_reach("prefill") and (failures < MAX_PREFILL_FAILURES or self.deaths.tier is not None)

    def prefill_failed(self, placement: Placement, error: PdserveError) -> None:
        """A prefill worker has failed, and the next attempt starts."""
        self.exclude_prefill(placement, error)
        self.journal.retry(error, placement.worker)

    def exclude_prefill(self, placement: Placement, error: PdserveError) -> None:
        """A prefill worker has failed, and gets no further attempt of this request."""
        self.failed_prefill.add(placement.incarnation)
        self.prefill_failures += _is_fault(error)

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
            alone, name = self.deaths.is_alone, f"{worker.worker_id}:{worker.epoch}"
            after = self.deaths.after(worker.tier)
            self.deaths = await self.quarantine.shared(self.generation, after, name, alone=alone)
        self.journal.lost_worker(worker, self.deaths.remark)
        last = f"The last was {worker.tier} worker {worker.worker_id}."
        if self.deaths.is_over:
            self.quarantine.add(self.generation, time.monotonic())
            raise PdserveError(
                f"The request has ended because {self.deaths.count} workers have failed by themselves while they "
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
            alone=self.deaths.is_alone,
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


def _is_fault(error: PdserveError) -> bool:
    """Whether a prefill worker has failed that lives, and does not shut down."""
    return not (is_gone(error) or isinstance(error, Draining))
