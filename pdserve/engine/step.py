"""The values of one step: what a scheduler plans, what the sampler answers, and what the service is told. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Protocol

from pdserve.base.device_event import DeviceEvent
from pdserve.base.errors import PdserveError
from pdserve.base.ids import BlockId, RequestId, RouterId
from pdserve.base.sampling import ChoiceTokens
from pdserve.engine.block_pool import CacheEvents
from pdserve.engine.pace import Pace
from pdserve.engine.sequence import SampleFailure, SampleResult, SampleRow, Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Prefill: tokens `[start, stop)` of one sequence are computed; then `samples` are drawn from its last row."""

    sequence: Sequence
    start: int
    stop: int
    samples: tuple[SampleRow, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LayersWritten:
    """KV of prompt tokens `[0, num_computed)` is stored for layers `[0, num_layers)`; told while the step goes on.

    Not told by kernels that compute a step in one call: then the step's end says it for all layers.
    """

    request_id: RequestId
    num_layers: int
    num_computed: int
    #: All blocks of the prompt, in order.
    block_table: tuple[BlockId, ...]
    #: It is stored at that moment; None: already.
    ready_event: DeviceEvent | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What one step computes: the last token of each decoding sequence, and chunks of those that are prefilled.

    A decoding sequence gets one token, drawn as its `sampling` says; samples are in the order of the rows, decoding
    sequences first.
    """

    decoding: tuple[Sequence, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    #: (source, destination) blocks to copy first, in this order.
    copies: tuple[tuple[BlockId, BlockId], ...] = ()
    #: What to tell as soon as it is so.
    reports: tuple[LayersWritten, ...] = ()
    #: Made before the tokens of the step before were known: the same sequences, each a token further than it tells.
    is_ahead: bool = False

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens of the chunks."""
        return sum(chunk.stop - chunk.start for chunk in self.chunks)

    def sample_rows(self) -> tuple[list[SampleRow], list[int]]:
        """What is sampled, in order, and for each the row of logits it is drawn from; n choices can share one."""
        rows = [sequence.sampling for sequence in self.decoding if sequence.sampling is not None]
        logits_rows = list(range(len(rows)))
        for index, chunk in enumerate((chunk for chunk in self.chunks if chunk.samples), len(rows)):
            rows += chunk.samples
            logits_rows += [index] * len(chunk.samples)
        return rows, logits_rows

    def scheduled(self) -> list[Sequence]:
        """The sequences in the order of their rows."""
        return [*self.decoding, *(chunk.sequence for chunk in self.chunks)]


# What the service is told.
@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """The request holds its blocks: blocks `[num_cached_blocks, len(block_table))` of the prompt are to be received."""

    request_id: RequestId
    #: All blocks of the prompt, in order.
    block_table: tuple[BlockId, ...]
    num_cached_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStarted:
    """The request was scheduled for the first time, in this step."""

    request_id: RequestId
    #: False only for a decode request whose KV was received.
    prefilled_locally: bool
    #: Prompt tokens that the prefix cache had.
    num_cached: int
    #: All blocks of the prompt, in order.
    block_table: tuple[BlockId, ...]


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
class Failure:
    """The request failed and holds nothing any more; others are not concerned."""

    request_id: RequestId
    error: PdserveError


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEvents:
    """What happened since the last step's events, each kind in order."""

    grants: tuple[Grant, ...] = ()
    started: tuple[RequestStarted, ...] = ()
    progress: tuple[PrefillProgress, ...] = ()
    tokens: tuple[RequestTokens, ...] = ()
    failures: tuple[Failure, ...] = ()
    #: Requests of which one sequence was preempted, once per sequence.
    preempted: tuple[RequestId, ...] = ()
    #: Decode: requests whose choices have all ended; they hold nothing any more.
    finished: tuple[RequestId, ...] = ()
    cache: CacheEvents = field(default_factory=CacheEvents)


@dataclass(slots=True, kw_only=True)
class EventLog:
    """Collects events between two steps; a scheduler owns one."""

    grants: list[Grant] = field(default_factory=list)
    started: list[RequestStarted] = field(default_factory=list)
    progress: list[PrefillProgress] = field(default_factory=list)
    tokens: dict[RequestId, list[ChoiceTokens]] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    preempted: list[RequestId] = field(default_factory=list)
    finished: list[RequestId] = field(default_factory=list)

    def __bool__(self) -> bool:
        return any(
            (self.grants, self.started, self.progress, self.tokens, self.failures, self.preempted, self.finished)
        )

    def fail(self, request_id: RequestId, results: Items[SampleResult]) -> None:
        """Report a request that ends because one of these results is a failure."""
        reason = next(result.reason for result in results if isinstance(result, SampleFailure))
        error = PdserveError(f"Request {request_id} cannot go on: {reason}.")
        self.failures.append(Failure(request_id=request_id, error=error))

    def forget_finished(self, request_id: RequestId) -> None:
        """Do not report that a request has finished, if that is still to be reported."""
        if request_id in self.finished:
            self.finished.remove(request_id)

    def drain(self, cache: CacheEvents) -> StepEvents:
        """Everything logged since the last call."""
        events = StepEvents(
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
    """How busy a worker is; totals count from its start."""

    #: Sequences (decode) or prompts (prefill) that are being computed.
    num_running: int
    #: Requests and preempted sequences that wait to run.
    num_waiting: int
    #: Decode: requests that hold blocks for a transfer. Prefill: computed prompts whose blocks are still held.
    num_held: int
    #: Tokens of prompts (and of preempted sequences) that are still to be computed here.
    queued_prompt_tokens: int
    #: Of those, the tokens of prompts that have no first token yet, by the router that sent them.
    queued_by_router: Mapping[RouterId, int]
    free_blocks: int
    total_blocks: int
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


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """All that one step has to tell; published once per step."""

    events: StepEvents
    load: Load
    durations: StepDurations
    #: As measured up to this step.
    pace: Pace
    #: It was launched before the step before had ended.
    is_ahead: bool
    #: Rows of the batch: sequences, and their tokens.
    num_sequences: int
    num_tokens: int
    #: Of `num_tokens`, those of prompts, and of preempted sequences that are computed again.
    num_prefill_tokens: int


class Scheduler(Protocol):
    """Policy of one tier: pure, driven by the step thread only."""

    def has_work(self) -> bool:
        """Whether a step would do or tell anything. False: only an outside call can change that."""

    def schedule(self, pace: Pace) -> StepPlan:
        """Decide on the next step, which will go at `pace`; `update` must follow before anything but `plan_ahead`."""

    def plan_ahead(self, plan: StepPlan) -> StepPlan | None:
        """The step after `plan`, which is in flight, whatever its tokens will be; None when it cannot be told yet.

        `update` must follow for both, in order. Sequences may end in the first; what the second has of them is dropped.
        """

    def update(self, plan: StepPlan, sampled: Items[SampleResult]) -> StepEvents:
        """Take in what the step computed: a result for each decoding sequence, then for each of the chunks' samples.

        Hands out no block: a step in flight may still write those that are freed here.
        """

    def load(self) -> Load:
        """The present load."""
