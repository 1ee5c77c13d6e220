"""A prompt as the prefill tier's policy sees it: what was requested, its phase, and the table of its moves. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import Enum

from pdserve.base.errors import InvalidTransition
from pdserve.base.ids import BlockTables, RequestId
from pdserve.engine.job import PromptJob
from pdserve.engine.sequence import Sequence, SequenceLimits
from pdserve.engine.step import LayersWritten, PrefillProgress, RequestStarted


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillSchedulerConfig:
    """Bounds on a step and on a sequence."""

    limits: SequenceLimits
    #: Maximum number of prompt tokens that one step computes.
    max_num_batched_tokens: int = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillJob(PromptJob):
    """One prompt to compute."""

    #: First tokens that were already streamed, one per choice; they are reported instead of sampling any.
    forced_first_tokens: tuple[int, ...] = ()
    #: Layer counts to report while a chunk is computed, each as soon as that many layers have their KV: ascending, at
    #: most the number of the model's layers.
    report_layers: tuple[int, ...] = ()


class PrefillPhase(Enum):
    """Where a prompt stands on this worker."""

    WAITING = "waiting"
    COMPUTING = "being computed"
    #: Its first tokens were reported; its blocks are still being sent.
    COMPUTED = "computed"
    RELEASED = "released"


#: Every legal move.
TRANSITIONS: dict[PrefillPhase, frozenset[PrefillPhase]] = {
    PrefillPhase.WAITING: frozenset({PrefillPhase.COMPUTING, PrefillPhase.RELEASED}),
    PrefillPhase.COMPUTING: frozenset({PrefillPhase.COMPUTED, PrefillPhase.RELEASED}),
    PrefillPhase.COMPUTED: frozenset({PrefillPhase.RELEASED}),
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
            prefilled_locally=True,
            num_cached=self.num_cached,
            block_tables=self.block_tables,
        )

    def progress(self) -> PrefillProgress:
        """A chunk was computed."""
        return PrefillProgress(
            request_id=self.request_id,
            num_computed=self.sequence.num_computed,
            num_prompt=self.sequence.num_prompt,
            num_cached=self.num_cached,
        )

    def layer_reports(self, stop: int) -> Iterator[LayersWritten]:
        """Reports that the job requests of a chunk that ends before token `stop`."""
        for num_layers in self.job.report_layers:
            yield LayersWritten(
                request_id=self.request_id, num_layers=num_layers, num_computed=stop, block_tables=self.block_tables
            )


class PromptQueues:
    """Every prompt on a worker, in the queue of its phase. Queues are in order of arrival."""

    def __init__(self) -> None:
        self._queues: dict[PrefillPhase, dict[RequestId, ScheduledPrompt]] = {
            phase: {} for phase in PrefillPhase if phase is not PrefillPhase.RELEASED
        }

    def add(self, prompt: ScheduledPrompt) -> None:
        """Append a prompt to the queue of its phase."""
        self._queues[prompt.phase][prompt.request_id] = prompt

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
            self.add(prompt)

    def __iter__(self) -> Iterator[ScheduledPrompt]:
        for queue in self._queues.values():
            yield from queue.values()
