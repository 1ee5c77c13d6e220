"""The sequences a decode worker runs, the oldest first, and who gives way when blocks run out. Pure."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass

from pdserve.engine.block_manager import BlockManager
from pdserve.engine.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningLimits:
    """Bounds of one step."""

    max_num_seqs: int
    #: Tokens computed per step for sequences with more than one pending, while others decode and while none does.
    max_prefill_tokens: int
    max_idle_prefill_tokens: int

    def __post_init__(self) -> None:
        assert self.max_num_seqs > 0, "a step must be allowed at least one sequence"
        assert min(self.max_prefill_tokens, self.max_idle_prefill_tokens) > 0, "a prefill must be able to advance"


class RunningSet:
    """Active sequences hold blocks; preempted ones gave theirs back and recompute when they are resumed.

    Age decides: the oldest is planned first, the youngest gives way first, whoever gave way first comes back first.
    """

    def __init__(self, blocks: BlockManager, limits: RunningLimits) -> None:
        self._blocks = blocks
        self._limits = limits
        #: Both sorted by (age, choice_index).
        self._active: list[Sequence] = []
        self._preempted: list[Sequence] = []
        self._num_added = 0
        self.num_preemptions = 0

    @property
    def num_active(self) -> int:
        """Sequences that hold blocks, including those beyond `max_num_seqs` that wait for their turn."""
        return len(self._active)

    @property
    def num_running(self) -> int:
        """Sequences that the next step computes."""
        return min(len(self._active), self._limits.max_num_seqs)

    @property
    def num_preempted(self) -> int:
        """Sequences that wait for blocks."""
        return len(self._preempted)

    @property
    def num_pending_tokens(self) -> int:
        """Tokens to compute before all sequences decode."""
        return sum(s.num_pending for s in (*self._active, *self._preempted) if s.num_pending > 1)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._active
        yield from self._preempted

    def next_age(self) -> int:
        """The age of the next request: its sequences are younger than all others."""
        self._num_added += 1
        return self._num_added

    def add(self, sequence: Sequence) -> None:
        """Let a sequence that holds blocks run."""
        insort(self._active, sequence, key=_order)

    def detach(self, sequence: Sequence) -> None:
        """Take a sequence out, with whatever blocks it holds."""
        (self._active if sequence in self._active else self._preempted).remove(sequence)

    def resume(self) -> None:
        """Bring preempted sequences back, the oldest first, while that leaves a free block for each active one."""
        while self._preempted and len(self._active) < self._limits.max_num_seqs:
            sequence = self._preempted[0]
            if not self._blocks.admit(sequence, sequence.num_tokens, headroom=len(self._active)):
                return
            del self._preempted[0]
            self.add(sequence)

    def plan(self) -> tuple[list[tuple[Sequence, int]], list[Sequence]]:
        """What to compute now: ((sequence, stop) pairs, the sequences that were preempted for it).

        Every pair has its slots `[num_computed, stop)`. The oldest active sequence is always among them, unless blocks
        held outside of this set leave it none.
        """
        heads = self._active[: self._limits.max_num_seqs]
        is_decoding = any(sequence.num_pending == 1 for sequence in heads)
        budget = self._limits.max_prefill_tokens if is_decoding else self._limits.max_idle_prefill_tokens
        planned: list[tuple[Sequence, int]] = []
        preempted: list[Sequence] = []
        index = 0
        while index < self.num_running:
            sequence = self._active[index]
            index += 1
            stop = sequence.num_tokens
            if sequence.num_pending > 1:
                stop = min(stop, sequence.num_computed + budget)
                budget -= stop - sequence.num_computed
            if stop > sequence.num_computed and self._make_room(sequence, stop, preempted):
                planned.append((sequence, stop))
        return planned, preempted

    def check_integrity(self) -> None:
        """Assert the order of both queues, and that blocks are held by the active ones only."""
        for queue in (self._active, self._preempted):
            assert queue == sorted(queue, key=_order), "a queue is out of order"
        assert all(sequence.block_table for sequence in self._active), "an active sequence holds no blocks"
        assert not any(sequence.block_table for sequence in self._preempted), "a preempted sequence holds blocks"

    def _make_room(self, sequence: Sequence, stop: int, preempted: list[Sequence]) -> bool:
        """Preempt from the youngest on until the sequence has its slots; False when it had to give way itself.

        The victims come after `sequence` in the order of planning, so none of them is planned already.
        """
        while not self._blocks.extend(sequence, stop):
            victim = self._active.pop()
            self._blocks.free(victim)
            insort(self._preempted, victim, key=_order)
            self.num_preemptions += 1
            preempted.append(victim)
            if victim is sequence:
                return False
        return True


def _order(sequence: Sequence) -> tuple[int, int]:
    return sequence.age, sequence.choice_index
