"""Best-effort requests: others take their blocks and their time, and their tokens stay the same."""

from __future__ import annotations

from dataclasses import replace

from decode_svc.request import DecodeJob
from pdserve.base.ids import RequestId
from pdserve.engine.pace import Pace
from tests.unit.decode_svc.decode_worker import ALWAYS, GREEDY, PROMPT, A, B, C, decode, job, oracle

LONG = replace(GREEDY, max_tokens=20)
#: Too slow for any best-effort sequence beside others.
SLOW = Pace(decode_step_s=1.0, decode_rows=1, decode_row_s=1.0)


def best_effort(request_id: RequestId) -> DecodeJob:
    return replace(job(request_id, PROMPT, LONG, threshold=ALWAYS), is_best_effort=True)


def test_they_stop_for_others_at_the_next_step_and_go_on_behind_them() -> None:
    worker = decode()
    worker.pace = SLOW
    worker.scheduler.reserve(best_effort(A))
    for _ in range(4):
        worker.step()
    worker.deliver(job(B, PROMPT))
    before = len(worker.tokens(A))
    assert 4 <= before < LONG.max_tokens
    while len(worker.tokens(B)) < GREEDY.max_tokens - 1:
        worker.step()
        assert [each.request_id for each in worker.plans[-1].decoding] == [B]
    assert len(worker.tokens(A)) == before
    worker.run()
    assert (worker.tokens(A), worker.tokens(B)) == (oracle(PROMPT, LONG), oracle(PROMPT)[1:])
    assert worker.all_free


def test_a_request_gets_the_blocks_of_the_youngest_of_them() -> None:
    worker = decode(9)  # Each needs three blocks, and two more at its end.
    for request_id in (A, B):
        worker.scheduler.reserve(best_effort(request_id))
    worker.step()
    worker.step()
    grant = worker.deliver(job(C, list(reversed(PROMPT))))
    assert grant.request_id == C
    worker.run()
    assert worker.scheduler.load().num_preemptions >= 1
    assert worker.tokens(C) == oracle(list(reversed(PROMPT)))[1:]
    assert worker.tokens(A) == worker.tokens(B) == oracle(PROMPT, LONG)
    assert worker.all_free


def test_of_those_that_wait_others_are_first() -> None:
    worker = decode(3)
    worker.scheduler.reserve(job(A, list(reversed(PROMPT)), threshold=ALWAYS))
    worker.step()
    worker.scheduler.reserve(replace(best_effort(B), arrived_at=1.0))
    worker.scheduler.reserve(replace(job(C, PROMPT, threshold=ALWAYS), arrived_at=2.0))
    started = [each.request_id for events in worker.run() for each in events.started]
    assert started == [C, B]


def test_a_prompt_larger_than_the_share_for_transfers_gets_all_that_they_hold() -> None:
    worker = decode(8, max_reserved_share=0.25)
    worker.scheduler.reserve(best_effort(A))
    worker.step()
    assert worker.deliver(job(B, list(range(1, 17)))).request_id == B
    worker.run()
    assert worker.tokens(A) == oracle(PROMPT, LONG)
    assert worker.all_free


def test_one_that_was_preempted_for_a_request_waits_until_that_has_its_blocks() -> None:
    """Fails if it is resumed and preempted in every step while the request waits for blocks of others."""
    worker = decode(9)
    worker.scheduler.reserve(job(A, list(range(1, 17)), replace(GREEDY, max_tokens=8), threshold=ALWAYS))
    worker.step()
    worker.scheduler.reserve(best_effort(B))
    worker.step()
    worker.scheduler.reserve(job(C, list(range(17, 1, -1)), threshold=ALWAYS))
    preempted = [attempt_id for events in worker.run() for attempt_id in events.preempted]
    assert [request_id for request_id, _ in preempted] == [B]
    assert worker.tokens(C) == oracle(list(range(17, 1, -1)))
    assert worker.tokens(B) == oracle(PROMPT, LONG)
    assert worker.all_free
