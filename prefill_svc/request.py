"""A prompt as the prefill tier's policy sees it: what was requested, its phase, and the table of its moves. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from enum import Enum

from pdserve.base.errors import InvalidTransition
from pdserve.base.ids import BlockTables, RequestId
from pdserve.base.pooling import Pooling, PoolingKind
from pdserve.engine.hidden_sum import HiddenSum
from pdserve.engine.job import MAX_SCORED_TOKENS, PromptJob, queue_by_arrival
from pdserve.engine.sequence import Sequence
from pdserve.engine.sequence_limits import SequenceLimits
from pdserve.engine.step import LayersWritten, PrefillChunk, PrefillProgress, RequestStarted


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillSchedulerConfig:
    """Bounds on a step and on a sequence."""

    limits: SequenceLimits
    #: Maximum number of prompt tokens that one step computes.
    max_num_batched_tokens: int = 2048
    #: Maximum number of prompt tokens that one step scores.
    max_scored_tokens: int = MAX_SCORED_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillJob(PromptJob):
    """One prompt to compute."""

    #: First tokens that were already streamed, one per choice; they are reported instead of sampling any.
    forced_first_tokens: tuple[int, ...] = ()
    #: Layer counts to report while a chunk is computed, each as soon as that many layers have their KV: ascending, at
    #: most the number of the model's layers.
    report_layers: tuple[int, ...] = ()
    #: Report the log-probabilities of the prompt's tokens, and sample nothing behind it.
    is_scored: bool = False
    #: Report the prompt's embedding, and sample nothing behind it; None: it has none.
    pooling: Pooling | None = None

    def new_sequence(self) -> Sequence:
        """As that of any prompt."""
        sequence = PromptJob.new_sequence(self)
        sequence.is_scored = self.is_scored or self._pools_whole_prompt
        return sequence

    @property
    def _pools_whole_prompt(self) -> bool:
        return self.pooling is not None and self.pooling.kind is not PoolingKind.LAST

    def pooled_rows(self, start: int, stop: int) -> range:
        """Rows of a chunk with prompt tokens `[start, stop)` whose hidden states make the embedding."""
        rows = range(stop - start)
        match self.pooling and self.pooling.kind:
            case PoolingKind.MEAN:
                return rows
            case PoolingKind.CLS:
                return rows[:1] if start == 0 else rows[:0]
            case PoolingKind.LAST:
                return rows[-1:] if stop == len(self.prompt_token_ids) else rows[:0]
        return range(0)


class PrefillPhase(Enum):
    """Where a prompt stands on this worker."""

    WAITING = "waiting"
    COMPUTING = "being computed"
    #: Its first tokens were reported; its blocks are still being sent.
    COMPUTED = "computed"
    #: Its tokens are no longer wanted; its blocks may still be read by a transfer.
    STOPPED = "stopped"
    RELEASED = "released"


#: Every legal move.
TRANSITIONS: dict[PrefillPhase, frozenset[PrefillPhase]] = {
    PrefillPhase.WAITING: frozenset({PrefillPhase.COMPUTING, PrefillPhase.STOPPED, PrefillPhase.RELEASED}),
    PrefillPhase.COMPUTING: frozenset({PrefillPhase.COMPUTED, PrefillPhase.STOPPED, PrefillPhase.RELEASED}),
    PrefillPhase.COMPUTED: frozenset({PrefillPhase.STOPPED, PrefillPhase.RELEASED}),
    PrefillPhase.STOPPED: frozenset({PrefillPhase.RELEASED}),
    PrefillPhase.RELEASED: frozenset(),
}


@dataclass(slots=True, eq=False, kw_only=True)
class ScheduledPrompt:
    """A prompt on this worker. Mutable, owned by the scheduler; only `advance` changes the phase."""

    job: PrefillJob
    #: The bare prompt; grows by no token.
    sequence: Sequence
    #: Tokens found in the prefix cache; while the prompt waits, those found when it arrived.
    num_cached: int
    phase: PrefillPhase = PrefillPhase.WAITING
    #: Blocks of the whole prompt; empty before the first chunk.
    block_tables: BlockTables = ()
    #: What its embedding is made of; None: it has none.
    pool: HiddenSum | None = None

    @property
    def request_id(self) -> RequestId:
        """Global id of the request."""
        return self.job.request_id

    @property
    def num_missing(self) -> int:
        """Prompt tokens that are still to be computed, or will probably be."""
        return self.sequence.num_prompt - max(self.sequence.num_computed, self.num_cached)

    def advance(self, phase: PrefillPhase) -> None:
        """Move on. Raises `InvalidTransition` for an illegal move, which changes nothing."""
        if phase not in TRANSITIONS[self.phase]:
            raise InvalidTransition(
                f"The prompt of request {self.request_id} is {self.phase.value}: it cannot become {phase.value}."
            )
        self.phase = phase

    # Events.
    def started(self) -> RequestStarted:
        """A step computes something of the prompt for the first time."""
        return RequestStarted(
            request_id=self.request_id,
            attempt=self.job.attempt,
            prefilled_locally=True,
            num_cached=self.num_cached,
            block_tables=self.block_tables,
        )

    def progress(self) -> PrefillProgress:
        """A chunk was computed."""
        return PrefillProgress(
            request_id=self.request_id,
            attempt=self.job.attempt,
            num_computed=self.sequence.num_computed,
            num_prompt=self.sequence.num_prompt,
            num_cached=self.num_cached,
        )

    def layer_reports(self, stop: int) -> Iterator[LayersWritten]:
        """Reports that the job requests of a chunk that ends before token `stop`."""
        for num_layers in self.job.report_layers:
            yield LayersWritten(
                request_id=self.request_id,
                attempt=self.job.attempt,
                num_layers=num_layers,
                num_computed=stop,
                block_tables=self.block_tables,
            )


class PromptQueues:
    """Every prompt on a worker, in the queue of its phase. Those that wait are in the order of their turns."""

    def __init__(self) -> None:
        self._queues: dict[PrefillPhase, dict[RequestId, ScheduledPrompt]] = {
            phase: {} for phase in PrefillPhase if phase is not PrefillPhase.RELEASED
        }

    def add(self, prompt: ScheduledPrompt) -> None:
        """Queue a prompt that has come."""
        queue_by_arrival(self._queues[prompt.phase], prompt)

    def find(self, request_id: RequestId) -> ScheduledPrompt | None:
        """The prompt of a request, if it is here."""
        return next((queue[request_id] for queue in self._queues.values() if request_id in queue), None)

    def in_phase(self, phase: PrefillPhase) -> Collection[ScheduledPrompt]:
        """Prompts in that phase; a live view."""
        return self._queues[phase].values()

    def move(self, prompt: ScheduledPrompt, phase: PrefillPhase) -> None:
        """Move a prompt to the end of another queue, or out. Raises `InvalidTransition` for an illegal move."""
        left = self._queues[prompt.phase]
        prompt.advance(phase)
        del left[prompt.request_id]
        if phase is not PrefillPhase.RELEASED:
            self._queues[phase][prompt.request_id] = prompt

    def __iter__(self) -> Iterator[ScheduledPrompt]:
        for queue in self._queues.values():
            yield from queue.values()


def may_join(chunks: Items[PrefillChunk], prompt: ScheduledPrompt) -> bool:
    """Whether a step with these chunks may have one of the prompt.

    One that runs alone gets steps of its own, and those that are pooled get steps without others.
    """
    if not chunks:
        return True
    is_alone = prompt.sequence.is_alone or chunks[0].sequence.is_alone
    return not is_alone and (prompt.pool is None) == (chunks[0].pool is None)
