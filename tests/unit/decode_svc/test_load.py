"""The load that a decode worker reports."""

from __future__ import annotations

from dataclasses import replace

from pdserve.base.ids import NO_ROUTER, RequestId, RouterId
from tests.unit.decode_svc.decode_worker import ALWAYS, GREEDY, PROMPT, A, B, C, decode, job


def test_the_load_counts_running_waiting_and_held_requests_and_queued_tokens() -> None:
    worker = decode(16, max_num_seqs=1, max_reserved_share=0.25)
    worker.deliver(job(A, PROMPT))
    worker.deliver(job(B, PROMPT))
    worker.scheduler.reserve(job(C, [2, *PROMPT]))
    worker.step()
    worker.scheduler.reserve(job(RequestId("d"), [3, *PROMPT]))
    load = worker.scheduler.load()
    assert (load.num_running, load.num_waiting, load.num_held) == (1, 2, 1)
    # Prompts that the prefill tier computes are not queued here.
    assert (load.queued_prompt_tokens, load.queued_by_router, load.total_blocks) == (0, {}, 16)
    worker.scheduler.prefill_locally(RequestId("d"))
    assert worker.scheduler.load().queued_prompt_tokens == 11
    assert worker.scheduler.load().queued_by_router == {NO_ROUTER: 11}
    assert load.free_blocks == worker.pool.num_free
    assert (load.prefix_query_tokens, load.prefix_hit_tokens) == (31, 8)


def test_the_load_reports_queued_prompts_by_router_until_their_first_token() -> None:
    worker = decode(16, max_num_batched_tokens=4)
    for request_id, router in ((A, "one"), (B, "two"), (C, "one")):
        queued = job(request_id, [11 + ord(request_id) % 3, *PROMPT], threshold=ALWAYS if request_id != C else 0)
        worker.scheduler.reserve(replace(queued, router_id=RouterId(router)))
    worker.step()
    # C waits for the prefill tier at first; then its prompt is to be computed here after all.
    assert worker.scheduler.load().queued_by_router == {"one": 7, "two": 11}
    worker.scheduler.prefill_locally(C)
    load = worker.scheduler.load()
    assert load.queued_by_router == {"one": 7 + 11, "two": 11}
    assert load.queued_prompt_tokens == 7 + 11 + 11
    while C not in worker.reported:
        worker.step()
    assert worker.scheduler.load().num_running > 0
    assert worker.scheduler.load().queued_by_router == {}


def test_a_single_last_token_of_a_prompt_is_not_queued_work() -> None:
    worker = decode(max_num_batched_tokens=9)
    worker.scheduler.reserve(job(A, PROMPT, threshold=ALWAYS))
    worker.step()
    load = worker.scheduler.load()
    assert (load.queued_prompt_tokens, load.queued_by_router) == (0, {})


def test_tokens_that_a_preempted_sequence_computes_again_belong_to_no_router() -> None:
    worker = decode(8)
    for name, prompt in ((A, PROMPT), (B, [3, *PROMPT[:7]])):
        worker.scheduler.reserve(job(name, prompt, replace(GREEDY, max_tokens=16), threshold=ALWAYS))
    while not worker.scheduler.load().num_preemptions:
        worker.step()
    load = worker.scheduler.load()
    assert load.queued_prompt_tokens > 8
    assert load.queued_by_router == {}


def test_blocks_of_the_load_are_held_reserved_or_free_and_waiting_ones_are_those_that_requests_lack() -> None:
    worker = decode(16, max_reserved_share=0.25)
    worker.deliver(job(A, PROMPT))
    worker.run()
    held = worker.pool.num_free
    # B finds two blocks in the prefix cache, lacks one, and gets one more for its first new token.
    worker.scheduler.reserve(job(B, [*PROMPT[:8], 20, 21, 22]))
    worker.step()
    load = worker.scheduler.load()
    assert (load.reserved_blocks, load.waiting_blocks) == (1, 0)
    # C needs four blocks, more than transfers may have.
    worker.scheduler.reserve(job(C, [29, *PROMPT, 30, 28, 27]))
    worker.step()
    load = worker.scheduler.load()
    assert (load.reserved_blocks, load.waiting_blocks) == (1, 4)
    assert load.free_blocks == held - 3
    worker.scheduler.abort(C)
    worker.scheduler.activate(B, [20])
    load = worker.scheduler.load()
    assert (load.reserved_blocks, load.waiting_blocks) == (0, 0)


def test_a_preempted_sequence_waits_for_the_blocks_it_had() -> None:
    worker = decode(8)
    for name, prompt in ((A, PROMPT), (B, [3, *PROMPT[:7]])):
        worker.scheduler.reserve(job(name, prompt, replace(GREEDY, max_tokens=16), threshold=ALWAYS))
    while not worker.scheduler.load().num_preemptions:
        worker.step()
    load = worker.scheduler.load()
    assert load.num_waiting == 1
    assert load.waiting_blocks >= 3
    worker.run()
    assert worker.scheduler.load().waiting_blocks == 0
