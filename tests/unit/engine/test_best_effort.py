"""Best-effort sequences: they come last, and get what the ITL budget of the others leaves."""

from __future__ import annotations

from dataclasses import replace

from pdserve.base.ids import RequestId
from pdserve.base.sampling import SamplingParams
from pdserve.engine.block_manager import BlockManager
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.job import PromptJob
from pdserve.engine.pace import Pace
from pdserve.engine.running import RunningLimits, RunningSet
from pdserve.engine.sequence import Sequence
from tests.unit.engine.fakes import BLOCK_SIZE, KEY, limits

#: A row, and two prefill tokens, take an eighth of a second. An eighth is not for any row.
PACE = Pace(decode_step_s=1 / 4, decode_rows=1, decode_row_s=1 / 8, prefill_token_s=1 / 16)


class Rig:
    """A running set with sequences of one block each. Those with a name in lower case are best-effort."""

    def __init__(self, num_blocks: int = 40, *, itl_budget_s: float = 1.0, max_num_seqs: int = 8) -> None:
        self.blocks = BlockManager(BlockPool(num_blocks, BLOCK_SIZE))
        self.running = RunningSet(
            self.blocks,
            RunningLimits(
                max_num_seqs=max_num_seqs, max_num_batched_tokens=100, itl_budget_s=itl_budget_s, min_prefill_tokens=1
            ),
        )

    def add(self, name: str, num_tokens: int = BLOCK_SIZE - 1, *, num_pending: int = 1) -> Sequence:
        """Adds a sequence; with one pending token it decodes."""
        sequence = Sequence.from_prompt(RequestId(name), [ord(name)] * num_tokens, SamplingParams(), hash_key=KEY)
        sequence.is_best_effort = name.islower()
        assert self.blocks.admit(sequence, num_tokens)
        sequence.admission_order = self.running.next_admission_order()
        sequence.sampling = limits().sample_row(sequence, 0)
        self.running.add(sequence)
        self.blocks.advance(sequence, num_tokens - num_pending)
        return sequence

    def plan(self) -> tuple[str, dict[str, int], str]:
        """The requests that decode, tokens of those in prefill, and the preempted ones."""
        planned = self.running.plan(PACE)
        self.running.check_integrity()
        chunks = {each.request_id: stop - each.num_computed for each, stop in planned.chunks}
        decoding, preempted = ("".join(s.request_id for s in each) for each in (planned.decoding, planned.preempted))
        return decoding, {str(name): size for name, size in chunks.items()}, preempted


def test_without_others_all_of_them_run() -> None:
    rig = Rig(itl_budget_s=0.001)
    for name in "abc":
        rig.add(name)
    assert rig.plan() == ("abc", {}, "")


def test_with_others_they_get_the_rows_that_the_budget_leaves() -> None:
    rig = Rig()  # Steps with them take at most three quarters of the budget: an eighth, and 5 rows.
    for name in "abcdefAB":
        rig.add(name)
    assert rig.plan() == ("ABabc", {}, "")


def test_others_that_need_the_whole_budget_leave_them_nothing_and_are_not_limited() -> None:
    rig = Rig(itl_budget_s=0.5)
    for name in "aABCD":
        rig.add(name)
    assert rig.plan() == ("ABCD", {}, "")


def test_they_run_again_in_the_step_after_the_others_have_ended() -> None:
    rig = Rig(itl_budget_s=0.25)
    rig.add("a")
    other = rig.add("A")
    assert rig.plan() == ("A", {}, "")
    rig.running.detach(other)
    rig.blocks.free(other)
    assert rig.plan() == ("a", {}, "")


def test_their_prompts_get_the_tokens_that_rows_and_prompts_of_others_leave() -> None:
    rig = Rig()
    rig.add("a", 40, num_pending=40)
    rig.add("A")
    assert rig.plan() == ("A", {"a": 8}, "")
    rig.add("B", 5, num_pending=5)
    assert rig.plan() == ("A", {"B": 5, "a": 3}, "")


def test_a_prompt_of_others_is_not_slowed_down_by_their_decoding() -> None:
    rig = Rig()
    rig.add("a")
    rig.add("A", 60, num_pending=60)
    assert rig.plan() == ("", {"A": 60}, "")


def test_others_get_seats_and_blocks_first() -> None:
    rig = Rig(num_blocks=3, max_num_seqs=2)
    for name in "abA":
        rig.add(name, BLOCK_SIZE)
    rig.running.plan(PACE)
    [other] = [each for each in rig.running if each.request_id == "A"]
    rig.blocks.advance(other, BLOCK_SIZE)
    other.tokens.append(1)  # It needs a second block, and none is free.
    assert rig.plan() == ("Aa", {}, "b")


def test_a_preempted_one_of_others_is_resumed_with_their_blocks_and_before_them() -> None:
    rig = Rig(num_blocks=4)
    first, second = rig.add("A", BLOCK_SIZE), rig.add("B", BLOCK_SIZE)
    for each in (first, second):
        rig.blocks.advance(each, BLOCK_SIZE)
        each.tokens.extend([1] * (BLOCK_SIZE + 1))
    assert rig.plan()[2] == "B"
    rig.running.detach(first)
    rig.blocks.free(first)
    for name in "ab":
        rig.add(name)
    rig.running.resume()
    rig.running.resume_best_effort(others_wait=False)
    assert rig.plan() == ("a", {"B": second.num_tokens - second.num_computed}, "b")


def test_a_request_that_waits_takes_their_blocks_and_waits_for_those_of_others_alone() -> None:
    rig = Rig()
    for name in "aA":
        rig.add(name)
    urgent = PromptJob(request_id=RequestId("B"), prompt_token_ids=[1], params=SamplingParams(), hash_key=KEY)
    batch = replace(urgent, is_best_effort=True)
    room, late = rig.running.room_for(urgent), rig.running.room_for(batch)
    assert room is not None
    assert late is not None
    assert (room.headroom, late.headroom) == (1, 2)
    assert not late.make_room()
    assert (room.make_room(), room.make_room()) == (True, False)
    assert rig.running.num_preempted == 1
    assert rig.running.room_for(urgent) is not None
    assert rig.running.room_for(batch) is None
    assert rig.plan() == ("A", {}, "a")
