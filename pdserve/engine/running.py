"""The sequences a decode worker runs, the oldest first, and who gives way when blocks run out. Pure."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass

from pdserve.engine.block_manager import BlockManager
from pdserve.engine.pace import Pace
from pdserve.engine.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningLimits:
    """Bounds of one step."""

    max_num_seqs: int
    #: Prefill tokens of one step.
    max_num_batched_tokens: int
    #: Beside decoding sequences, prefill is to keep a step within this time ...
    itl_budget_s: float
    #: ... but gets this many tokens in any case, so that it advances.
    min_prefill_tokens: int

    def __post_init__(self) -> None:
        assert self.max_num_seqs > 0, "a step must be allowed at least one sequence"
        assert min(self.max_num_batched_tokens, self.min_prefill_tokens) > 0, "a prefill must be able to advance"

    def prefill_budget(self, pace: Pace, *, is_decoding: bool) -> int:
        """Prefill tokens that the next step may compute."""
        if not is_decoding:
            return self.max_num_batched_tokens
        return min(self.max_num_batched_tokens, max(self.min_prefill_tokens, pace.tokens_within(self.itl_budget_s)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """What to compute now. All have their slots."""

    #: Choices of which one token is pending: the usual ones.
    decoding: tuple[Sequence, ...]
    #: (sequence, stop): `[num_computed, stop)` of the others.
    chunks: tuple[tuple[Sequence, int], ...]
    #: Sequences that gave their blocks for it.
    preempted: tuple[Sequence, ...]


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
        pending = (len(s.tokens) - s.num_computed for s in self)
        return sum(count for count in pending if count > 1)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._active
        yield from self._preempted

    def next_admission_order(self) -> int:
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

    def plan(self, pace: Pace, *, is_awaiting: bool = False) -> Planned:
        """What to compute now, at this pace. `is_awaiting`: sequences may come to decode at any moment.

        The oldest active sequence is always among it, unless blocks held outside of this set leave it none.
        """
        is_decoding = is_awaiting or any(map(_is_decoding, self._active[: self._limits.max_num_seqs]))
        budget = self._limits.prefill_budget(pace, is_decoding=is_decoding)
        decoding: list[Sequence] = []
        chunks: list[tuple[Sequence, int]] = []
        preempted: list[Sequence] = []
        index = 0
        while index < len(self._active) and index < self._limits.max_num_seqs:
            sequence = self._active[index]
            index += 1
            if _is_decoding(sequence):
                if self._make_room(sequence, len(sequence.tokens), preempted):
                    decoding.append(sequence)
                continue
            stop = min(sequence.num_tokens, sequence.num_computed + budget)
            budget -= stop - sequence.num_computed
            if stop > sequence.num_computed and self._make_room(sequence, stop, preempted):
                chunks.append((sequence, stop))
        return Planned(decoding=tuple(decoding), chunks=tuple(chunks), preempted=tuple(preempted))

    def make_room_ahead(self, decoding: Items[Sequence]) -> bool:
        """Give each the slot after the one it writes now, while nobody has to give way; else change nothing."""
        short = [sequence for sequence in decoding if sequence.num_slots <= len(sequence.tokens)]
        if len(short) > self._blocks.pool.num_free:
            return False
        for sequence in short:
            is_extended = self._blocks.extend(sequence, len(sequence.tokens) + 1)
            assert is_extended, "a free block was counted above"
        return True

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
        while stop > sequence.num_slots and not self._blocks.extend(sequence, stop):
            victim = self._active.pop()
            self._blocks.free(victim)
            insort(self._preempted, victim, key=_order)
            self.num_preemptions += 1
            preempted.append(victim)
            if victim is sequence:
                return False
        return True


def _is_decoding(sequence: Sequence) -> bool:
    return len(sequence.tokens) - sequence.num_computed == 1 and sequence.sampling is not None


def _order(sequence: Sequence) -> tuple[int, int]:
    return sequence.admission_order, sequence.choice_index
