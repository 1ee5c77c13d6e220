"""The sequences that a decode worker runs, and which of them are preempted when blocks run out. Pure."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass

from pdserve.base.ids import RequestId
from pdserve.engine.block_manager import BlockManager
from pdserve.engine.pace import Pace
from pdserve.engine.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningLimits:
    """Bounds of one step."""

    max_num_seqs: int
    #: Prefill tokens of one step.
    max_num_batched_tokens: int
    #: Duration of a step, in seconds, that prefill should not exceed while sequences are decoding.
    itl_budget_s: float
    #: Prefill tokens of a step whatever `itl_budget_s` is, so that prefill always advances.
    min_prefill_tokens: int

    def __post_init__(self) -> None:
        assert self.max_num_seqs > 0, "a step must be allowed at least one sequence"
        assert min(self.max_num_batched_tokens, self.min_prefill_tokens) > 0, "a prefill must be able to advance"

    def prefill_budget(self, pace: Pace, *, is_decoding: bool) -> int:
        """Prefill tokens allowed in the next step."""
        if not is_decoding:
            return self.max_num_batched_tokens
        return min(self.max_num_batched_tokens, max(self.min_prefill_tokens, pace.tokens_within(self.itl_budget_s)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """Sequences to compute in the next step, all with their slots."""

    #: Choices with exactly one pending token.
    decoding: tuple[Sequence, ...]
    #: (sequence, stop): tokens `[num_computed, stop)` of sequences in prefill.
    chunks: tuple[tuple[Sequence, int], ...]
    #: Sequences that lost their blocks to the others.
    preempted: tuple[Sequence, ...]


class RunningSet:
    """Active sequences hold blocks; preempted ones have returned theirs, and recompute when they are resumed.

    The order of admission decides: the oldest sequence is planned and resumed first, the youngest is preempted first.
    """

    def __init__(self, blocks: BlockManager, limits: RunningLimits) -> None:
        self._blocks = blocks
        self._limits = limits
        #: Both sorted by (admission_order, choice_index).
        self._active: list[Sequence] = []
        self._preempted: list[Sequence] = []
        self._num_added = 0
        #: Sequences that are computed in steps without other requests.
        self._num_alone = 0
        #: Whose step was the last one, while there are such sequences: a request's, or (None) that of all others.
        self._turn: RequestId | None = None
        self.num_preemptions = 0

    @property
    def num_active(self) -> int:
        """Sequences that hold blocks, including those that wait because `max_num_seqs` others run."""
        return len(self._active)

    @property
    def num_running(self) -> int:
        """Sequences in the next step."""
        return min(len(self._active), self._limits.max_num_seqs)

    @property
    def num_preempted(self) -> int:
        """Sequences that wait for blocks."""
        return len(self._preempted)

    @property
    def num_waiting_blocks(self) -> int:
        """Blocks that the preempted sequences had; some may still be found in the prefix cache."""
        pool = self._blocks.pool
        return sum(pool.blocks_of_all_groups_for(sequence.num_tokens) for sequence in self._preempted)

    @property
    def num_pending_tokens(self) -> int:
        """Tokens to compute before all sequences decode."""
        pending = (len(s.tokens) - s.num_computed for s in self)
        return sum(count for count in pending if count > 1)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._active
        yield from self._preempted

    def next_admission_order(self) -> int:
        """The `admission_order` of the next request, whose sequences are younger than all others."""
        self._num_added += 1
        return self._num_added

    def add(self, sequence: Sequence) -> None:
        """Start running a sequence that holds blocks."""
        insort(self._active, sequence, key=_order)
        self._num_alone += sequence.is_alone

    def queue(self, sequence: Sequence) -> None:
        """Start running a sequence that holds no blocks, as if it had been preempted."""
        insort(self._preempted, sequence, key=_order)
        self._num_alone += sequence.is_alone

    def detach(self, sequence: Sequence) -> None:
        """Stop running a sequence, which keeps the blocks that it holds."""
        (self._active if sequence in self._active else self._preempted).remove(sequence)
        self._num_alone -= sequence.is_alone

    def resume(self) -> None:
        """Resume preempted sequences, the oldest first, while that leaves each active one its next blocks."""
        while self._preempted and len(self._active) < self._limits.max_num_seqs:
            sequence = self._preempted[0]
            if not self._blocks.admit(sequence, sequence.num_tokens, headroom=len(self._active)):
                return
            del self._preempted[0]
            insort(self._active, sequence, key=_order)

    def plan(self, pace: Pace, *, is_awaiting: bool = False) -> Planned:
        """Plan the next step at this pace. `is_awaiting`: more sequences may start to decode at any time.

        The plan always has the oldest active sequence, unless blocks held outside of this set leave none for it, or
        requests take turns: those that run alone, each in a step of its own, and all others.
        """
        takes_turns = self._num_alone > 0
        if takes_turns:
            self._turn = self._next_turn()
        is_decoding = is_awaiting or any(map(_is_decoding, self._active[: self._limits.max_num_seqs]))
        budget = self._limits.prefill_budget(pace, is_decoding=is_decoding)
        decoding: list[Sequence] = []
        chunks: list[tuple[Sequence, int]] = []
        preempted: list[Sequence] = []
        index = num_planned = 0
        while index < len(self._active) and num_planned < self._limits.max_num_seqs:
            sequence = self._active[index]
            index += 1
            if takes_turns and _group(sequence) != self._turn:
                continue
            num_planned += 1
            if _is_decoding(sequence):
                if self._extend_or_preempt(sequence, len(sequence.tokens), preempted):
                    decoding.append(sequence)
                continue
            stop, cost = _next_chunk(sequence, budget, pace if is_decoding else Pace())
            budget = max(0, budget - cost)
            if stop > sequence.num_computed and self._extend_or_preempt(sequence, stop, preempted):
                chunks.append((sequence, stop))
        return Planned(decoding=tuple(decoding), chunks=tuple(chunks), preempted=tuple(preempted))

    def extend_ahead(self, decoding: Items[Sequence]) -> bool:
        """Give each sequence the slot after the one it writes now.

        False, and no change, if that needs a preemption, or while requests take turns.
        """
        if self._num_alone:
            return False
        full = [sequence for sequence in decoding if sequence.num_slots <= len(sequence.tokens)]
        if len(full) * self._blocks.pool.num_groups > self._blocks.pool.num_free:
            return False
        for sequence in full:
            is_extended = self._blocks.extend(sequence, len(sequence.tokens) + 1)
            assert is_extended, "free blocks were counted above"
        return True

    def check_integrity(self) -> None:
        """Assert the order of both queues, and that only active sequences hold blocks."""
        for queue in (self._active, self._preempted):
            assert queue == sorted(queue, key=_order), "a queue is out of order"
        assert all(sequence.block_table for sequence in self._active), "an active sequence holds no blocks"
        assert not any(sequence.block_table for sequence in self._preempted), "a preempted sequence holds blocks"
        assert self._num_alone == sum(sequence.is_alone for sequence in self), "sequences that run alone are miscounted"

    def _next_turn(self) -> RequestId | None:
        """The group after the last one, in the order of their oldest active sequences."""
        groups = list(dict.fromkeys(map(_group, self._active)))
        following = groups.index(self._turn) + 1 if self._turn in groups else 0
        return groups[following % len(groups)] if groups else None

    def _extend_or_preempt(self, sequence: Sequence, stop: int, preempted: list[Sequence]) -> bool:
        """Preempt the youngest sequences until this one has its slots; False when it was preempted itself.

        Victims come after `sequence` in the order of planning, so none of them has been planned yet.
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


def _group(sequence: Sequence) -> RequestId | None:
    """The request, if it runs alone; None is the group of all others."""
    return sequence.request_id if sequence.is_alone else None


def _order(sequence: Sequence) -> tuple[int, int]:
    return sequence.admission_order, sequence.choice_index


def _next_chunk(sequence: Sequence, budget: int, pace: Pace) -> tuple[int, int]:
    """End of the sequence's chunk, and its cost with that of first tokens, in prefill tokens.

    When the first tokens of many choices do not fit in the budget, the prompt's last token is left to the next step.
    """
    stop = min(sequence.num_tokens, sequence.num_computed + budget)
    num_tokens = stop - sequence.num_computed
    if stop < sequence.num_tokens or not num_tokens:
        return stop, num_tokens
    cost = num_tokens + pace.tokens_of_samples(sequence.params.n if sequence.sampling is None else 1)
    return (stop - 1, num_tokens - 1) if cost > budget and num_tokens > 1 else (stop, cost)
