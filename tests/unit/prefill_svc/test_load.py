"""The load that a prefill worker reports."""

from __future__ import annotations

from dataclasses import replace

from pdserve.base.ids import RouterId
from tests.unit.prefill_svc.prefill_worker import PROMPT, A, B, C, job, prefill


def test_the_load_counts_prompts_and_their_tokens() -> None:
    worker = prefill(6, budget=4)
    worker.scheduler.add(job(A, PROMPT[:3]))
    worker.run()
    worker.scheduler.add(job(B, PROMPT))
    worker.scheduler.add(job(C, [2, *PROMPT]))
    worker.step()
    load = worker.scheduler.load()
    assert (load.num_held, load.num_running, load.num_waiting) == (1, 1, 1)
    assert load.queued_prompt_tokens == 6 + 11
    assert (load.free_blocks, load.total_blocks) == (2, 6)
    assert (load.prefix_query_tokens, load.prefix_hit_tokens) == (13, 0)


def test_the_load_reports_queued_prompts_by_router() -> None:
    worker = prefill(9, budget=4)
    for request_id, router in ((A, "one"), (B, "two"), (C, "one")):
        worker.scheduler.add(replace(job(request_id, [11 + ord(request_id) % 3, *PROMPT]), router_id=RouterId(router)))
    worker.step()
    load = worker.scheduler.load()
    assert load.queued_by_router == {"one": 7 + 11, "two": 11}
    assert load.queued_prompt_tokens == 7 + 11 + 11
    worker.scheduler.release(B)
    assert worker.scheduler.load().queued_by_router == {"one": 7 + 11}
    worker.run()
    assert worker.scheduler.load().queued_by_router == {}


def test_for_a_waiting_prompt_the_load_counts_the_tokens_that_were_not_cached_on_arrival() -> None:
    worker = prefill(6, budget=4)
    worker.scheduler.add(job(A, PROMPT))
    worker.run()
    worker.scheduler.release(A)
    for request_id, prompt in ((B, [20, 21]), (C, [*PROMPT, 30])):
        worker.scheduler.add(replace(job(request_id, prompt), router_id=RouterId(request_id)))
    assert worker.scheduler.load().queued_by_router == {B: 2, C: 3}
    assert (worker.scheduler.num_cached(C), worker.scheduler.num_computed(C)) == (8, 0)
    worker.run()
    assert (worker.scheduler.num_cached(C), worker.scheduler.load().queued_prompt_tokens) == (8, 0)


def test_tokens_evicted_while_a_prompt_waits_count_again_once_it_is_computed() -> None:
    worker = prefill(6, budget=4)
    worker.scheduler.add(job(A, PROMPT))
    worker.run()
    worker.scheduler.release(A)
    worker.scheduler.add(job(B, [20 + token % 4 for token in range(24)]))
    worker.scheduler.add(job(C, [*PROMPT, 30]))
    assert worker.scheduler.load().queued_prompt_tokens == 24 + 3
    while not worker.scheduler.load().num_held:
        worker.step()
    worker.scheduler.release(B)
    worker.step()
    assert worker.scheduler.load().queued_prompt_tokens == 11 - 4


def test_waiting_prompts_need_the_blocks_that_are_not_cached() -> None:
    worker = prefill(6, budget=4)
    worker.scheduler.add(job(A, PROMPT))
    worker.run()
    worker.scheduler.add(job(B, [20, *PROMPT, 21]))
    worker.scheduler.add(job(C, [*PROMPT, 30]))
    assert worker.scheduler.load().waiting_blocks == 3 + 1
    assert worker.scheduler.load().reserved_blocks == 0
    worker.scheduler.release(B)
    worker.run()
    assert worker.scheduler.load().waiting_blocks == 0
