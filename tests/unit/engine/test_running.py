"""The running set: order of planning, preemption, resumption and prefill budgets."""

from __future__ import annotations

import pytest

from pdserve.base.ids import RequestId
from pdserve.base.sampling import SamplingParams
from pdserve.engine.block_manager import BlockManager
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.pace import Pace
from pdserve.engine.running import RunningLimits, RunningSet
from pdserve.engine.sequence import Sequence
from tests.unit.engine.fakes import BLOCK_SIZE, KEY, limits

BOUNDS = limits()

LIMITS = RunningLimits(max_num_seqs=3, max_num_batched_tokens=5, itl_budget_s=0.1, min_prefill_tokens=2)
#: So slow that prefill gets only its minimum while sequences decode.
PACE = Pace(decode_step_s=1.0, prefill_token_s=1.0)


class Rig:
    def __init__(self, num_blocks: int, limits: RunningLimits = LIMITS) -> None:
        self.pool = BlockPool(num_blocks, BLOCK_SIZE)
        self.blocks = BlockManager(self.pool)
        self.running = RunningSet(self.blocks, limits)

    def add(self, name: str, num_tokens: int, *, num_computed: int = 0, alone: bool = False) -> Sequence:
        """Adds a choice with slots for its tokens, of which `num_computed` are computed."""
        prompt = [ord(name)] * num_tokens
        sequence = Sequence.from_prompt(RequestId(name), prompt, SamplingParams(), hash_key=KEY)
        sequence.is_alone = alone
        assert self.blocks.admit(sequence, num_tokens)
        sequence.admission_order = self.running.next_admission_order()
        sequence.sampling = BOUNDS.sample_row(sequence, 0)
        self.running.add(sequence)
        if num_computed:
            self.blocks.advance(sequence, num_computed)
        return sequence

    def grow(self, sequence: Sequence) -> None:
        """Computes all pending tokens, and adds a sampled one."""
        self.blocks.advance(sequence, sequence.num_tokens)
        sequence.tokens.append(1)

    def plan(self) -> tuple[list[tuple[str, int]], list[str]]:
        """(request, stop) of all planned sequences, the oldest first, and the preempted requests."""
        planned = self.running.plan(PACE)
        self.running.check_integrity()
        stops = [*((s, s.num_tokens) for s in planned.decoding), *planned.chunks]
        stops.sort(key=lambda item: (item[0].admission_order, item[0].choice_index))
        return [(s.request_id, stop) for s, stop in stops], [s.request_id for s in planned.preempted]


def test_the_budget_goes_to_the_oldest_and_is_small_while_a_sequence_decodes() -> None:
    rig = Rig(20)
    rig.add("a", 4)
    rig.add("b", 7)
    assert rig.plan() == ([("a", 4), ("b", 1)], [])
    rig.add("c", 3, num_computed=2)
    assert rig.plan() == ([("a", 2), ("c", 3)], [])


def test_sequences_beyond_the_limit_keep_their_blocks_and_wait() -> None:
    rig = Rig(20)
    for name in "abcd":
        rig.add(name, 2, num_computed=1)
    assert [name for name, _ in rig.plan()[0]] == ["a", "b", "c"]
    assert (rig.running.num_active, rig.running.num_running) == (4, 3)


def test_the_youngest_is_preempted_first_and_resumed_last() -> None:
    rig = Rig(4)
    a, *_ = [rig.add(name, 4, num_computed=3) for name in "abcd"]
    rig.grow(a)
    assert rig.plan() == ([("a", 5), ("b", 4), ("c", 4)], ["d"])
    b = next(sequence for sequence in rig.running if sequence.request_id == "b")
    rig.grow(b)
    assert rig.plan() == ([("a", 5), ("b", 5)], ["c"])
    assert [sequence.request_id for sequence in rig.running] == ["a", "b", "c", "d"]
    rig.running.detach(a)
    rig.blocks.free(a)
    rig.running.resume()
    assert [sequence.request_id for sequence in rig.running] == ["b", "c", "d"]
    assert rig.running.num_active == 2


def test_a_younger_request_is_preempted_before_choices_of_an_older_one() -> None:
    rig = Rig(5)
    first = rig.add("a", 6)
    rig.blocks.advance(first, 6)
    rig.running.add(rig.blocks.fork(first, 1))
    rig.add("b", 6, num_computed=5)
    for sequence in list(rig.running):
        if sequence.request_id == "a":
            sequence.tokens.append(1)
    # The one free block becomes the first choice's copy of the partial block; the other choice keeps the original.
    assert rig.plan() == ([("a", 7), ("a", 7), ("b", 6)], [])
    for sequence in list(rig.running):
        if sequence.request_id == "a":
            rig.blocks.advance(sequence, 7)
            sequence.tokens.extend([1, 1])
            sequence.num_computed = 8
    assert rig.plan() == ([("a", 9), ("a", 9)], ["b"])


def test_resuming_leaves_a_free_block_for_each_active_sequence() -> None:
    rig = Rig(4)
    a = rig.add("a", 8, num_computed=7)
    b = rig.add("b", 8, num_computed=7)
    rig.grow(a)
    assert rig.plan()[1] == ["b"]
    rig.running.resume()
    assert rig.running.num_preempted == 1
    # b would fit, but then a could not grow.
    assert rig.pool.num_free == 1
    rig.running.detach(a)
    rig.blocks.free(a)
    rig.running.resume()
    assert list(rig.running) == [b]


def test_resuming_needs_more_than_its_own_blocks_while_a_sequence_is_active() -> None:
    rig = Rig(3)
    a = rig.add("a", 4, num_computed=3)
    b = rig.add("b", 8, num_computed=7)
    rig.grow(a)
    assert rig.plan()[1] == ["b"]
    rig.blocks.free(a)
    a.tokens = a.tokens[:4]
    assert rig.blocks.admit(a, 4)
    assert rig.pool.num_free == 2
    rig.running.resume()
    assert not b.block_table
    rig.running.detach(a)
    rig.blocks.free(a)
    rig.running.resume()
    assert len(b.block_table) == 2


def test_a_sequence_preempts_itself_when_blocks_are_held_outside_the_set() -> None:
    rig = Rig(3)
    a = rig.add("a", 4, num_computed=3)
    outside = rig.pool.allocate(2)
    assert outside is not None
    rig.grow(a)
    assert rig.plan() == ([], ["a"])
    rig.running.resume()
    assert rig.running.num_active == 0
    rig.pool.release(outside)
    rig.running.resume()
    assert rig.plan()[0] == [("a", 5)]


def test_a_bare_prompt_with_one_pending_token_is_not_decoding() -> None:
    rig = Rig(20)
    bare = rig.add("a", 4, num_computed=3)
    bare.sampling = None
    planned = rig.running.plan(PACE)
    assert (planned.decoding, planned.chunks) == ((), ((bare, 4),))


@pytest.mark.parametrize(
    ("pace", "while_decoding"),
    [
        (Pace(decode_step_s=0.04, prefill_token_s=0.02), 3),
        (Pace(decode_step_s=0.04, prefill_token_s=0.001), 5),
        (Pace(decode_step_s=0.04, prefill_token_s=0.5), 2),
        (Pace(decode_step_s=0.5, prefill_token_s=0.2), 2),
        (Pace(decode_step_s=0.5, prefill_token_s=0.08), 3),
    ],
)
def test_the_prefill_budget_keeps_a_step_within_the_itl_budget_between_its_bounds(
    pace: Pace, while_decoding: int
) -> None:
    assert LIMITS.prefill_budget(pace, is_decoding=True) == while_decoding
    assert LIMITS.prefill_budget(pace, is_decoding=False) == 5


def test_first_tokens_of_many_choices_count_in_the_itl_budget() -> None:
    rig = Rig(40, RunningLimits(max_num_seqs=9, max_num_batched_tokens=100, itl_budget_s=0.1, min_prefill_tokens=1))
    rig.add("a", 2, num_computed=1)
    many = rig.add("b", 9)
    many.sampling, many.params = None, SamplingParams(n=128)
    rig.add("c", 4)
    cheap = Pace(decode_step_s=0.02, prefill_token_s=0.001, sample_row_s=0.0001)
    assert [(s.request_id, stop) for s, stop in rig.running.plan(cheap).chunks] == [("b", 9), ("c", 4)]
    # 80 tokens fit in the budget, and sampling takes as long as 128.
    costly = Pace(decode_step_s=0.02, prefill_token_s=0.001, sample_row_s=0.001)
    assert [(s.request_id, stop) for s, stop in rig.running.plan(costly).chunks] == [("b", 8), ("c", 4)]
    rig.blocks.advance(many, 8)
    assert [(s.request_id, stop) for s, stop in rig.running.plan(costly).chunks] == [("b", 9)]


@pytest.mark.parametrize("broken", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_limits_that_allow_no_work_are_an_assertion(broken: tuple[int, int, int]) -> None:
    seqs, batched, minimum = broken
    with pytest.raises(AssertionError):
        RunningLimits(max_num_seqs=seqs, max_num_batched_tokens=batched, itl_budget_s=0.1, min_prefill_tokens=minimum)


def test_requests_that_run_alone_take_turns_with_all_others() -> None:
    rig = Rig(20)
    for name in "abcd":
        rig.add(name, 2, num_computed=1, alone=name in "bd")
    steps = [[name for name, _ in rig.plan()[0]] for _ in range(7)]
    assert steps == [["b"], ["d"], ["a", "c"], ["b"], ["d"], ["a", "c"], ["b"]]
    assert not rig.running.extend_ahead([])


def test_one_that_runs_alone_without_others_gets_every_step() -> None:
    rig = Rig(20)
    alone = rig.add("a", 2, num_computed=1, alone=True)
    assert [rig.plan()[0] for _ in range(3)] == [[("a", 2)]] * 3
    rig.running.detach(alone)
    rig.blocks.free(alone)
    assert rig.plan() == ([], [])


def test_a_preempted_sequence_that_runs_alone_comes_back_to_its_turns() -> None:
    rig = Rig(3)
    old = rig.add("a", 8)
    rig.add("b", 4, num_computed=3, alone=True)
    rig.grow(old)
    assert [rig.plan(), rig.plan()] == [([("b", 4)], []), ([("a", 9)], ["b"])]
    rig.running.detach(old)
    rig.blocks.free(old)
    rig.running.resume()
    rig.running.check_integrity()
    assert [name for name, _ in rig.plan()[0]] == ["b"]
