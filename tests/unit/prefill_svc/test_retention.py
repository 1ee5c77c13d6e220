"""Prompts that are handed over keep their blocks longer than others, within a share."""

from __future__ import annotations

import pytest

from pdserve.base.ids import AttemptId, BlockHash, RequestId
from pdserve.engine.block_pool import BlockPool
from prefill_svc import retention
from prefill_svc.retention import RetainedPrompts
from tests.unit.prefill_svc.prefill_worker import PROMPT, A, B, C, job, prefill


def attempt(name: str) -> AttemptId:
    return AttemptId(RequestId(name), 1)


def hashes(*numbers: int) -> list[BlockHash]:
    return [BlockHash(number.to_bytes(16, "little")) for number in numbers]


def test_half_of_the_blocks_are_retained_and_the_oldest_prompts_give_way() -> None:
    pool = BlockPool(8, 4)
    prompts = RetainedPrompts(pool)
    assert prompts.add(attempt("a"), hashes(1, 2)) == []
    assert prompts.add(attempt("b"), hashes(3)) == []
    assert prompts.add(attempt("c"), hashes(4, 5)) == [attempt("a")]
    assert pool.num_retained == 3
    for name in "abc":
        prompts.end(attempt(name))
    assert pool.num_retained == 0


def test_prompts_with_a_common_prefix_retain_it_once() -> None:
    pool = BlockPool(8, 4)
    prompts = RetainedPrompts(pool)
    assert not any(prompts.add(attempt(name), hashes(1, 2, 3)) for name in "abcdef")
    assert pool.num_retained == 3
    prompts.end(attempt("a"))
    assert pool.num_retained == 3


def test_of_a_prompt_beyond_the_share_the_head_is_retained() -> None:
    pool = BlockPool(8, 4)
    prompts = RetainedPrompts(pool)
    assert prompts.add(attempt("a"), hashes(*range(1, 8))) == []
    assert pool.num_retained == 4
    assert prompts.add(attempt("b"), hashes(9)) == [attempt("a")]
    prompts.end(attempt("b"))
    assert pool.num_retained == 0


def test_so_many_prompts_are_retained_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where prompts with a common prefix, which retain little, hold any number of messages."""
    monkeypatch.setattr(retention, "_MAX_PROMPTS", 2)
    prompts = RetainedPrompts(BlockPool(8, 4))
    assert [prompts.add(attempt(name), hashes(1)) for name in "abc"] == [[], [], [attempt("a")]]


def test_the_share_counts_the_blocks_of_all_kv_groups() -> None:
    pool = BlockPool(8, 4, (None, 4))
    prompts = RetainedPrompts(pool)
    assert prompts.add(attempt("a"), hashes(1, 2)) == []
    assert prompts.add(attempt("b"), hashes(3)) == [attempt("a")]


def test_a_prompt_that_is_retained_is_found_again_behind_many_others() -> None:
    """Without it, the others would have taken its blocks."""
    for is_retained in (True, False):
        worker = prefill(num_blocks=8)
        prompts = RetainedPrompts(worker.pool)
        worker.scheduler.add(job(A, PROMPT))
        worker.run()
        worker.scheduler.release(A)
        if is_retained:
            prompts.add(attempt("a"), job(A, PROMPT).new_sequence().hash_full_blocks(worker.pool.block_size))
        for number in range(6):
            worker.scheduler.add(job(B, [20 + number] * 10))
            worker.run()
            worker.scheduler.release(B)
        worker.scheduler.add(job(C, PROMPT))
        assert worker.scheduler.num_cached(C) == (8 if is_retained else 0)
