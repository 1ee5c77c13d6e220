"""Values of one step: what a scheduler plans, what the sampler returns, and what the service receives. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from typing import Protocol

from pdserve.base.device_event import DeviceEvent
from pdserve.base.errors import PdserveError
from pdserve.base.ids import BlockId, BlockTables, RequestId, RouterId
from pdserve.base.sampling import ChoiceTokens
from pdserve.base.workers import Tier
from pdserve.engine.block_pool import CacheEvents
from pdserve.engine.pace import Pace
from pdserve.engine.sequence import SampleFailure, SampleResult, SampleRow, Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillChunk:
    """Prefill of tokens `[start, stop)` of one sequence; `samples` are then sampled from its last row."""

    sequence: Sequence
    start: int
    stop: int
    samples: tuple[SampleRow, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LayersWritten:
    """KV of prompt tokens `[0, num_computed)` is stored for layers `[0, num_layers)`; reported during the step.

    Kernels that compute a step in one call do not report it. The end of the step then stands for all layers.
    """

    request_id: RequestId
    num_layers: int
    num_computed: int
    #: All blocks of the prompt, in order.
    block_tables: BlockTables
    #: Happens when the KV is stored; None: it is stored already.
    ready_event: DeviceEvent | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Work of one step: the last token of each decoding sequence, and chunks of sequences in prefill.

    Each decoding sequence gets one token, sampled by its `sampling`. Samples are in the order of the rows, those of
    decoding sequences first.
    """

    decoding: tuple[Sequence, ...] = ()
    chunks: tuple[PrefillChunk, ...] = ()
    #: (source, destination) blocks to copy first, in this order.
    copies: tuple[tuple[BlockId, BlockId], ...] = ()
    #: Reports to send as soon as they are true.
    reports: tuple[LayersWritten, ...] = ()
    #: Planned before the previous step's tokens were known: its sequences again, each one token beyond its `tokens`.
    is_ahead: bool = False

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens of the chunks."""
        return sum(chunk.stop - chunk.start for chunk in self.chunks)

    def sample_rows(self) -> tuple[list[SampleRow], list[int]]:
        """All samples in order, and for each the row of logits that it is sampled from; n choices can share a row."""
        rows = [sequence.sampling for sequence in self.decoding if sequence.sampling is not None]
        logits_rows = list(range(len(rows)))
        for index, chunk in enumerate((chunk for chunk in self.chunks if chunk.samples), len(rows)):
            rows += chunk.samples
            logits_rows += [index] * len(chunk.samples)
        return rows, logits_rows

    def without(self, request_ids: Collection[RequestId]) -> StepPlan:
        """The plan without some requests. Their copies stay: no other request holds the blocks."""
        return replace(
            self,
            decoding=tuple(each for each in self.decoding if each.request_id not in request_ids),
            chunks=tuple(each for each in self.chunks if each.sequence.request_id not in request_ids),
            reports=tuple(each for each in self.reports if each.request_id not in request_ids),
        )

    def scheduled(self) -> list[Sequence]:
        """The sequences in the order of their rows."""
        return [*self.decoding, *(chunk.sequence for chunk in self.chunks)]


# Events for the service.
@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """The request holds its blocks. In each KV group those from `first_missing` on are to be received."""

    request_id: RequestId
    #: All blocks of the prompt, in order.
    block_tables: BlockTables
    num_cached_blocks: int
    #: Index of a block in each table.
    first_missing: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStarted:
    """The request was scheduled for the first time, in this step."""

    request_id: RequestId
    #: False only for a decode request whose KV was received.
    prefilled_locally: bool
    #: Prompt tokens found in the prefix cache.
    num_cached: int
    #: All blocks of the prompt, in order.
    block_tables: BlockTables


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillProgress:
    """KV of prompt tokens `[0, num_computed)` is stored; reported after each chunk."""

    request_id: RequestId
    num_computed: int
    num_prompt: int
    num_cached: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTokens:
    """New tokens of a request, at most one `ChoiceTokens` per choice."""

    request_id: RequestId
    choices: tuple[ChoiceTokens, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFailure:
    """The request failed and holds no resources any more; other requests are not affected."""

    request_id: RequestId
    error: PdserveError
    #: No row could be prepared for it; otherwise its logits were at fault.
    is_unprepared: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEvents:
    """Events of one tier's scheduler since those of its last step, each kind in order."""

    tier: Tier
    grants: tuple[Grant, ...] = ()
    started: tuple[RequestStarted, ...] = ()
    progress: tuple[PrefillProgress, ...] = ()
    tokens: tuple[RequestTokens, ...] = ()
    failures: tuple[RequestFailure, ...] = ()
    #: Requests with a preempted sequence, once for each such sequence.
    preempted: tuple[RequestId, ...] = ()
    #: Decode: requests whose choices have all ended; they hold no resources any more.
    finished: tuple[RequestId, ...] = ()
    cache: CacheEvents = field(default_factory=CacheEvents)


@dataclass(slots=True, kw_only=True)
class EventLog:
    """Collects events between two steps; a scheduler owns one."""

    tier: Tier
    grants: list[Grant] = field(default_factory=list)
    started: list[RequestStarted] = field(default_factory=list)
    progress: list[PrefillProgress] = field(default_factory=list)
    tokens: dict[RequestId, list[ChoiceTokens]] = field(default_factory=dict)
    failures: list[RequestFailure] = field(default_factory=list)
    preempted: list[RequestId] = field(default_factory=list)
    finished: list[RequestId] = field(default_factory=list)

    def __bool__(self) -> bool:
        return any(
            (self.grants, self.started, self.progress, self.tokens, self.failures, self.preempted, self.finished)
        )

    def fail(self, request_id: RequestId, failure: SampleFailure) -> None:
        """Report a request that ends because of a failure."""
        error = PdserveError(f"Request {request_id} cannot go on: {failure.reason}.")
        self.failures.append(RequestFailure(request_id=request_id, error=error, is_unprepared=failure.is_unprepared))

    def forget_finished(self, request_id: RequestId) -> None:
        """Do not report that a request has finished, if that is still to be reported."""
        if request_id in self.finished:
            self.finished.remove(request_id)

    def drain(self, cache: CacheEvents) -> StepEvents:
        """Return all events since the last call."""
        events = StepEvents(
            tier=self.tier,
            grants=tuple(self.grants),
            started=tuple(self.started),
            progress=tuple(self.progress),
            tokens=tuple(
                RequestTokens(request_id=request_id, choices=tuple(choices))
                for request_id, choices in self.tokens.items()
            ),
            failures=tuple(self.failures),
            preempted=tuple(self.preempted),
            finished=tuple(self.finished),
            cache=cache,
        )
        self.grants.clear()
        self.started.clear()
        self.progress.clear()
        self.tokens.clear()
        self.failures.clear()
        self.preempted.clear()
        self.finished.clear()
        return events


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Load of a worker; totals count from its start."""

    #: Sequences (decode) or prompts (prefill) that are being computed.
    num_running: int
    #: Requests and preempted sequences that wait to run.
    num_waiting: int
    #: Decode: requests that hold blocks for a transfer. Prefill: computed prompts whose blocks are still held.
    num_held: int
    #: Tokens of prompts and of preempted sequences that are still to be computed here.
    queued_prompt_tokens: int
    #: The share of `queued_prompt_tokens` whose prompts have no first token yet, by the router that sent them.
    queued_by_router: Mapping[RouterId, int]
    free_blocks: int
    total_blocks: int
    #: Blocks held for transfers that have not been received.
    reserved_blocks: int
    #: Free blocks that waiting requests and preempted sequences need before they can run.
    waiting_blocks: int
    num_preemptions: int
    prefix_query_tokens: int
    prefix_hit_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDurations:
    """Seconds spent in each phase of a step."""

    schedule_s: float
    build_s: float
    forward_s: float
    sample_s: float

    @property
    def total_s(self) -> float:
        """Seconds of the whole step."""
        return self.schedule_s + self.build_s + self.forward_s + self.sample_s


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """Output of one step; published once per step."""

    events: StepEvents
    load: Load
    durations: StepDurations
    #: Averages up to and including this step.
    pace: Pace
    #: The step was launched before the previous one had ended.
    is_ahead: bool
    #: Sequences and tokens of the batch.
    num_sequences: int
    num_tokens: int
    #: The share of `num_tokens` that prefills prompts or recomputes preempted sequences.
    num_prefill_tokens: int


class Scheduler(Protocol):
    """Policy of one tier: pure, driven by the step thread only."""

    def has_work(self) -> bool:
        """Whether a step would compute or report anything. If not, only a call from outside can change that."""

    def schedule(self, pace: Pace) -> StepPlan:
        """Plan the next step, expected to run at `pace`. Only `plan_ahead` may be called before its `update`."""

    def plan_ahead(self, plan: StepPlan) -> StepPlan | None:
        """Plan the step after `plan`, which is in flight; None when that depends on the tokens of `plan`.

        `update` must follow for both, in order. Sequences may end in the first; their results of the second are
        dropped.
        """

    def update(self, plan: StepPlan, sampled: Items[SampleResult]) -> StepEvents:
        """Process the results of a step: one for each decoding sequence, then one for each sample of the chunks.

        Allocates no blocks: a step in flight may still write to those that are freed here.
        """

    def fail(self, request_id: RequestId, failure: SampleFailure) -> None:
        """End a request of the plan that `schedule` has just returned, which is then run without it."""

    def load(self) -> Load:
        """The current load."""
