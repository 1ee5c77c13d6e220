"""Prompts that are computed on the decode worker: which ones, and in chunks of which size."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdserve.base.errors import RequestError
from pdserve.base.sampling import SamplingParams
from pdserve.engine.pace import Pace
from tests.unit.decode_svc.decode_worker import (
    ALWAYS,
    GREEDY,
    PROMPT,
    A,
    B,
    C,
    decode,
    first_tokens,
    job,
    oracle,
    sizes,
)
from tests.unit.engine.fakes import VOCAB


def test_a_prompt_with_few_uncached_tokens_is_computed_here_without_a_grant() -> None:
    worker = decode()
    worker.scheduler.reserve(job(A, PROMPT, threshold=9))
    assert worker.grant(A)  # 10 tokens are more than 9
    worker.scheduler.abort(A)
    worker.scheduler.reserve(job(B, PROMPT, threshold=10))
    assert not any(events.grants for events in worker.run())
    assert worker.tokens(B) == oracle(PROMPT)
    worker.scheduler.reserve(job(C, PROMPT, threshold=2))
    assert not any(events.grants for events in worker.run())
    assert worker.tokens(C) == oracle(PROMPT)


def test_with_threshold_zero_even_a_fully_cached_prompt_gets_a_grant() -> None:
    worker = decode()
    worker.deliver(job(A, PROMPT[:8]))
    worker.run()
    worker.scheduler.reserve(job(B, PROMPT[:8]))
    assert worker.grant(B).num_cached_blocks == 2


def test_chunks_fit_the_itl_budget_alongside_running_sequences_and_max_num_batched_tokens_otherwise() -> None:
    worker = decode(itl_budget_s=0.010, max_num_batched_tokens=7)
    worker.pace = Pace(decode_step_s=0.004, prefill_token_s=0.001)
    worker.deliver(job(A, PROMPT[:3], replace(GREEDY, max_tokens=4)))
    worker.scheduler.reserve(job(B, [*PROMPT, *PROMPT, *PROMPT[:5]], threshold=ALWAYS))
    seen = sizes(worker)
    assert seen[:6] == [{A: 1, B: 6}, {A: 1, B: 6}, {A: 1, B: 6}, {B: 7}, {B: 1}, {B: 1}]
    assert [p.num_computed for events in worker.seen for p in events.progress] == [6, 12, 18, 25]
    assert worker.tokens(B) == oracle([*PROMPT, *PROMPT, *PROMPT[:5]])


def test_chunks_fit_the_itl_budget_while_a_transfer_is_expected_too() -> None:
    worker = decode(itl_budget_s=0.010, max_num_batched_tokens=7)
    worker.pace = Pace(decode_step_s=0.004, prefill_token_s=0.001)
    worker.scheduler.reserve(job(A, PROMPT))
    worker.grant(A)
    worker.scheduler.reserve(job(B, [*PROMPT, *PROMPT], threshold=ALWAYS))
    assert sizes(worker)[:3] == [{B: 6}, {B: 6}, {B: 6}]
    worker.scheduler.abort(A)
    worker.scheduler.reserve(job(C, [7, *PROMPT, *PROMPT], threshold=ALWAYS))
    assert sizes(worker)[:2] == [{C: 7}, {C: 7}]


@pytest.mark.parametrize(
    "pace", [Pace(decode_step_s=9.0, prefill_token_s=9.0), Pace(decode_step_s=0.0, prefill_token_s=9.0)]
)
def test_prefill_advances_by_a_block_per_step_even_if_that_exceeds_the_itl_budget(pace: Pace) -> None:
    worker = decode(itl_budget_s=0.010)
    worker.pace = pace
    worker.deliver(job(A, PROMPT[:3]))
    worker.scheduler.reserve(job(B, PROMPT, threshold=ALWAYS))
    assert sizes(worker)[:4] == [{A: 1, B: 4}, {A: 1, B: 4}, {A: 1, B: 2}, {A: 1, B: 1}]


def test_prompts_share_the_itl_budget_oldest_first() -> None:
    worker = decode(itl_budget_s=0.010)
    worker.pace = Pace(decode_step_s=0.004, prefill_token_s=0.001)
    worker.deliver(job(A, PROMPT[:3]))
    worker.scheduler.reserve(job(B, PROMPT, threshold=ALWAYS))
    worker.scheduler.reserve(job(C, [7, *PROMPT], threshold=ALWAYS))
    assert sizes(worker)[:4] == [{A: 1, B: 6}, {A: 1, B: 4, C: 2}, {A: 1, B: 1, C: 6}, {A: 1, B: 1, C: 3}]


def test_a_single_last_token_of_a_prompt_counts_as_prefill() -> None:
    worker = decode(max_num_batched_tokens=3)
    worker.scheduler.reserve(job(A, PROMPT, threshold=ALWAYS))
    worker.run()
    assert [plan.num_prefill_tokens for plan in worker.plans[:5]] == [3, 3, 3, 1, 0]


def test_a_granted_request_whose_transfer_failed_is_computed_here() -> None:
    worker = decode()
    worker.scheduler.reserve(job(A, PROMPT))
    worker.grant(A)
    worker.scheduler.prefill_locally(A)
    worker.run()
    assert worker.tokens(A) == oracle(PROMPT)


def test_a_granted_request_that_is_cached_entirely_recomputes_only_its_last_block() -> None:
    worker = decode(5)
    worker.deliver(job(A, PROMPT[:8]))
    worker.run()
    worker.scheduler.reserve(job(B, PROMPT[:8]))
    worker.grant(B)
    before = len(worker.plans)
    worker.scheduler.prefill_locally(B)
    worker.scheduler.check_integrity()
    worker.run()
    assert (worker.plans[before].chunks[0].start, worker.plans[before].chunks[0].stop) == (4, 8)
    assert worker.tokens(B) == oracle(PROMPT[:8])


def test_local_prefill_can_be_requested_while_waiting_for_blocks() -> None:
    worker = decode(4, max_reserved_share=1.0)
    worker.scheduler.reserve(job(A, PROMPT))
    worker.scheduler.reserve(job(B, [2, *PROMPT]))
    worker.run()
    worker.scheduler.prefill_locally(B)
    worker.run()
    assert worker.tokens(B) == []
    worker.scheduler.abort(A)
    worker.run()
    assert worker.tokens(B) == oracle([2, *PROMPT])


@pytest.mark.parametrize("n", [1, 3])
def test_forced_first_tokens_replace_sampled_ones_and_are_not_reported(n: int) -> None:
    params = SamplingParams(n=n, seed=11, max_tokens=7, ignore_eos=True)
    worker = decode()
    worker.scheduler.reserve(job(A, PROMPT, params))
    worker.grant(A)
    worker.scheduler.prefill_locally(A, first_tokens(job(A, PROMPT, params)))
    worker.run()
    for choice in range(n):
        assert worker.reported[A][choice][0].first_index == 1
        assert worker.tokens(A, choice) == oracle(PROMPT, params, choice)[1:]


def test_after_local_prefill_choices_are_reported_from_their_first_token_on() -> None:
    params = SamplingParams(n=3, seed=11, max_tokens=7, ignore_eos=True, logprobs=2)
    worker = decode()
    worker.scheduler.reserve(job(A, PROMPT, params, threshold=ALWAYS))
    worker.run()
    for choice in range(3):
        assert worker.tokens(A, choice) == oracle(PROMPT, params, choice)
        assert all(len(message.logprobs) == 1 for message in worker.reported[A][choice])


@pytest.mark.parametrize("tokens", [[], [1, 2], [VOCAB], [-1]])
def test_impossible_first_tokens_are_refused_and_the_reservation_stays(tokens: list[int]) -> None:
    worker = decode()
    worker.scheduler.reserve(job(A, PROMPT))
    worker.grant(A)
    with pytest.raises(RequestError):
        worker.scheduler.activate(A, tokens)
    worker.scheduler.check_integrity()
    assert worker.scheduler.load().num_held == 1
