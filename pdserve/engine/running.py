"""The sequences that a decode worker runs, and which of them are preempted when blocks run out. Pure."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass

from pdserve.base.ids import RequestId
from pdserve.engine.block_manager import BlockManager
from pdserve.engine.job import PromptJob
from pdserve.engine.pace import Pace
from pdserve.engine.sequence import Sequence
from pdserve.engine.spare_time import SpareTime, is_decoding_next


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningLimits:
    """Bounds of one step."""

    max_num_seqs: int
    #: Prefill tokens of one step.
    max_num_batched_tokens: int
    #: Duration of a step, in seconds, that prefill and best-effort sequences should not exceed while others decode.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What a request that waits may take of the blocks."""

    #: Free blocks that are left for active sequences.
    headroom: int
    #: Frees blocks of a sequence that gives way to the request. False when there is none.
    make_room: Callable[[], bool]


class RunningSet:
    """Active sequences hold blocks; preempted ones have returned theirs, and recompute when they are resumed.

    The order of admission decides: the oldest sequence is planned and resumed first, the youngest is preempted first.
    Best-effort sequences come after all others, and while there are others, they get what the ITL budget leaves.
    """

    def __init__(self, blocks: BlockManager, limits: RunningLimits) -> None:
        self._blocks = blocks
        self._limits = limits
        #: Both sorted by (is_best_effort, admission_order, choice_index).
        self._active: list[Sequence] = []
        self._preempted: list[Sequence] = []
        self._num_added = 0
        #: Sequences that are computed in steps without other requests.
        self._num_alone = 0
        #: Whose step was the last one, while there are such sequences: a request's, or (None) that of all others.
        self._turn: RequestId | None = None
        #: Preempted since the last plan.
        self._lately_preempted: list[Sequence] = []
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

    def room_for(self, job: PromptJob) -> Room | None:
        """The blocks that a request which waits may take; None: preempted sequences wait for them before it."""
        if any(job.is_best_effort or not sequence.is_best_effort for sequence in self._preempted[:1]):
            return None
        if job.is_best_effort:
            return Room(headroom=len(self._active), make_room=lambda: False)
        return Room(headroom=self._num_active_of_others(), make_room=self._give_up)

    @property
    def num_waiting_blocks(self) -> int:
        """Blocks that the preempted sequences had; some may still be found in the prefix cache."""
        pool = self._blocks.pool
        return sum(pool.blocks_of_all_groups_for(sequence.num_tokens) for sequence in self._preempted)

    @property
    def num_pending_tokens(self) -> int:
        """Tokens to compute before all sequences decode."""
        return sum(each.num_pending for each in self if each.num_pending > 1 and not is_decoding_next(each))

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
        while self._preempted and not self._preempted[0].is_best_effort:
            if not self._resume_next(self._num_active_of_others(), self._give_up):
                return

    def resume_best_effort(self, *, others_wait: bool) -> None:
        """As `resume`, unless others wait for blocks: those would preempt them again."""
        while not others_wait and self._preempted and self._preempted[0].is_best_effort:
            if not self._resume_next(len(self._active), lambda: False):
                return

    def plan(self, pace: Pace, *, is_awaiting: bool = False) -> Planned:
        """Plan the next step at this pace. `is_awaiting`: more sequences may start to decode at any time.

        The plan always has the oldest active sequence, unless blocks held outside of this set leave none for it, or
        requests take turns: those that run alone, each in a step of its own, and all others.
        """
        if takes_turns := self._num_alone > 0:
            self._turn = self._next_turn()
        num_others, max_num_seqs = self._num_active_of_others(), self._limits.max_num_seqs
        is_decoding = is_awaiting or any(
            map(is_decoding_next, self._active[: min(num_others or max_num_seqs, max_num_seqs)])
        )
        budget = self._limits.prefill_budget(pace, is_decoding=is_decoding)
        spare = SpareTime(pace, self._limits.itl_budget_s)
        decoding: list[Sequence] = []
        chunks: list[tuple[Sequence, int]] = []
        index = num_planned = 0
        while index < len(self._active) and num_planned < max_num_seqs:
            sequence = self._active[index]
            index += 1
            gives_way = sequence.is_best_effort and num_others > 0
            if (takes_turns and _group(sequence) != self._turn) or (gives_way and spare.num_tokens_of(sequence) == 0):
                continue
            num_planned += 1
            if is_decoding_next(sequence):
                if self._extend_or_preempt(sequence, len(sequence.tokens)):
                    if sequence.num_pending == 1:
                        decoding.append(sequence)
                    else:
                        chunks.append((sequence, len(sequence.tokens)))
                    spare.take_row()
                continue
            tokens = min(budget, spare.num_tokens_of(sequence)) if gives_way else budget
            stop, cost = _next_chunk(sequence, tokens, pace if is_decoding else Pace())
            budget = max(0, budget - cost)
            spare.take(cost)
            if stop > sequence.num_computed and self._extend_or_preempt(sequence, stop):
                chunks.append((sequence, stop))
        preempted, self._lately_preempted = tuple(self._lately_preempted), []
        return Planned(decoding=tuple(decoding), chunks=tuple(chunks), preempted=preempted)

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

    def _resume_next(self, headroom: int, make_room: Callable[[], bool]) -> bool:
        if headroom >= self._limits.max_num_seqs:
            return False
        sequence = self._preempted[0]
        while not self._blocks.admit(sequence, sequence.num_tokens, headroom=headroom):
            if not make_room():
                return False
        del self._preempted[0]
        insort(self._active, sequence, key=_order)
        return True

    def _give_up(self) -> bool:
        """Preempt the youngest best-effort sequence for another request. False when none holds blocks."""
        if not self._active or not self._active[-1].is_best_effort:
            return False
        self._preempt_youngest()
        return True

    def _num_active_of_others(self) -> int:
        """Active sequences that are not best-effort; they come first."""
        return bisect_left(self._active, True, key=lambda sequence: sequence.is_best_effort)

    def _extend_or_preempt(self, sequence: Sequence, stop: int) -> bool:
        """Preempt the youngest sequences until this one has its slots; False when it was preempted itself.

        Victims come after `sequence` in the order of planning, so none of them has been planned yet.
        """
        while stop > sequence.num_slots and not self._blocks.extend(sequence, stop):
            if self._preempt_youngest() is sequence:
                return False
        return True

    def _preempt_youngest(self) -> Sequence:
        victim = self._active.pop()
        self._blocks.free(victim)
        insort(self._preempted, victim, key=_order)
        self.num_preemptions += 1
        self._lately_preempted.append(victim)
        return victim


def _group(sequence: Sequence) -> RequestId | None:
    """The request, if it runs alone; None is the group of all others."""
    return sequence.request_id if sequence.is_alone else None


def _order(sequence: Sequence) -> tuple[bool, int, int]:
    return sequence.is_best_effort, sequence.admission_order, sequence.choice_index


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
