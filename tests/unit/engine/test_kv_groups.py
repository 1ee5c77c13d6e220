"""Block tables of a full and a windowed KV group: what is held, reused, registered and counted."""

from __future__ import annotations

import pytest

from decode_svc.scheduler_config import DecodeSchedulerConfig
from pdserve.base.errors import NoFreeBlocks
from pdserve.base.ids import RequestId
from pdserve.base.sampling import SamplingParams
from pdserve.engine.block_manager import BlockManager
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.job import PromptJob
from pdserve.engine.running import RunningLimits, RunningSet
from pdserve.engine.sequence import Sequence
from tests.unit.engine.fakes import BLOCK_SIZE, KEY, limits
from tests.unit.engine.grouped import WINDOWS

LIMITS = RunningLimits(max_num_seqs=4, max_num_batched_tokens=64, itl_budget_s=0.1, min_prefill_tokens=2)


def manager(num_blocks: int) -> BlockManager:
    return BlockManager(BlockPool(num_blocks, BLOCK_SIZE, WINDOWS))


def admitted(blocks: BlockManager, num_tokens: int, *, num_slots: int | None = None, name: str = "a") -> Sequence:
    sequence = Sequence.from_prompt(RequestId(name), [ord(name)] * num_tokens, SamplingParams(), hash_key=KEY)
    assert blocks.admit(sequence, num_slots or num_tokens, recompute_last=num_slots is None)
    return sequence


def freed(blocks: BlockManager, num_tokens: int) -> None:
    """A sequence that was computed and has left its blocks in the prefix cache."""
    sequence = admitted(blocks, num_tokens)
    blocks.advance(sequence, num_tokens)
    blocks.free(sequence)


def test_blocks_behind_the_window_are_free_while_the_sequence_runs() -> None:
    blocks = manager(20)
    sequence = admitted(blocks, 40)
    assert blocks.pool.num_free == 0
    tables = [list(table) for table in sequence.tables]
    blocks.advance(sequence, 24)
    # Token 24 reads from token 19 on: blocks 0 to 3 of the windowed group are behind it.
    assert blocks.pool.num_free == 4
    assert [list(table) for table in sequence.tables] == tables
    blocks.pool.check_integrity([sequence.held_blocks()])
    blocks.free(sequence)
    assert blocks.pool.num_free == 20


def test_blocks_that_were_not_sent_are_never_found_in_the_prefix_cache() -> None:
    blocks = manager(22)
    sequence = admitted(blocks, 40, num_slots=41)
    blocks.receive_prompt(sequence)
    first, stop = sequence.num_dropped[1], 10
    assert first == (40 - 6 + 1) // BLOCK_SIZE
    hashes = sequence.hash_full_blocks(BLOCK_SIZE)
    assert [blocks.pool.count_prefix([h], 1) for h in hashes] == [0] * first + [1] * (stop - first)
    assert blocks.pool.count_prefix(hashes, 0) == stop


def test_the_window_of_a_prompts_last_block_is_found_with_the_whole_prompt() -> None:
    """A transfer that does not come leaves the last token to be computed, and with it its block."""
    blocks = manager(30)
    freed(blocks, 40)
    sequence = admitted(blocks, 40, num_slots=41)
    assert sequence.num_computed == 40
    blocks.recompute_last_token(sequence)
    assert sequence.num_computed == 36
    assert sequence.num_dropped[1] <= (36 - 6 + 1) // BLOCK_SIZE
    blocks.pool.check_integrity([sequence.held_blocks()])


def test_a_prefix_is_found_up_to_where_the_window_was_kept() -> None:
    """What the first sequence had behind its window was computed, so it stays until its blocks are needed."""
    blocks = manager(20)
    freed(blocks, 40)
    assert blocks.count_cached(admitted_later(24)) == 20
    taken = blocks.pool.allocate(6)
    assert taken is not None
    assert blocks.count_cached(admitted_later(24)) < 20


def admitted_later(num_tokens: int) -> Sequence:
    return Sequence.from_prompt(RequestId("b"), [ord("a")] * num_tokens, SamplingParams(), hash_key=KEY)


def test_forks_share_the_blocks_of_both_groups_and_copy_both_partial_ones() -> None:
    blocks = manager(20)
    prompt = admitted(blocks, 10)
    blocks.advance(prompt, 10)
    fork = blocks.fork(prompt, 1)
    blocks.pool.check_integrity([prompt.held_blocks(), fork.held_blocks()])
    assert blocks.extend(fork, 11)
    assert len(blocks.pool.drain_copies()) == 2
    assert [table[2] for table in fork.tables] != [table[2] for table in prompt.tables]
    blocks.pool.check_integrity([prompt.held_blocks(), fork.held_blocks()])


def test_an_extension_takes_a_block_of_each_group_or_none() -> None:
    blocks = manager(5)
    sequence = admitted(blocks, 8)
    blocks.advance(sequence, 3)
    assert not blocks.extend(sequence, 9)
    assert blocks.pool.num_free == 1
    assert {len(table) for table in sequence.tables} == {2}


def test_running_ahead_needs_a_block_of_each_group() -> None:
    for num_blocks, may_run in [(5, False), (6, True)]:
        blocks = manager(num_blocks)
        running = RunningSet(blocks, LIMITS)
        sequence = admitted(blocks, 8)
        blocks.advance(sequence, 3)
        running.add(sequence)
        assert running.extend_ahead([sequence]) is may_run


def test_waiting_sequences_need_blocks_in_each_group() -> None:
    blocks = manager(8)
    running = RunningSet(blocks, LIMITS)
    running._preempted.append(admitted_later(9))
    assert running.num_waiting_blocks == 6


def test_headroom_is_kept_in_each_group() -> None:
    blocks = manager(8)
    sequence = admitted_later(8)
    assert not blocks.admit(sequence, 8, headroom=3)
    assert blocks.admit(sequence, 8, headroom=2)


def test_a_prompt_must_fit_into_both_groups() -> None:
    job = PromptJob(request_id=RequestId("a"), prompt_token_ids=[1] * 12, params=SamplingParams(), hash_key=KEY)
    job.require_servable(limits(), BlockPool(6, BLOCK_SIZE, WINDOWS), num_output_tokens=0)
    with pytest.raises(NoFreeBlocks, match="needs 6 KV blocks"):
        job.require_servable(limits(), BlockPool(5, BLOCK_SIZE, WINDOWS), num_output_tokens=0)
    config = DecodeSchedulerConfig(limits=limits())
    assert config.limits_within(BlockPool(7, BLOCK_SIZE, WINDOWS)).max_model_len == 3 * BLOCK_SIZE + 1
