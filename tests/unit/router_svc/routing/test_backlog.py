"""The backlog of the admission queue in seconds."""

from __future__ import annotations

from dataclasses import replace

from pdserve.peers.workers import WorkerLoad, WorkerRecord
from router_svc.routing.backlog import prefill_backlog_s
from tests.support.records import worker_record


def worker(rate: float | None, *, while_decoding: float | None = None) -> WorkerRecord:
    load = WorkerLoad(prefill_tokens_per_s=rate, prefill_tokens_per_s_while_decoding=while_decoding)
    return replace(worker_record(), load=load)


def test_the_backlog_is_the_work_of_one_average_worker() -> None:
    assert prefill_backlog_s(3000, [worker(500.0), worker(1500.0)]) == 3.0


def test_an_empty_queue_is_no_backlog_even_before_a_rate_is_known() -> None:
    assert prefill_backlog_s(0, []) == 0.0
    assert prefill_backlog_s(0, [worker(None)]) == 0.0


def test_workers_without_a_rate_are_taken_for_average_ones_and_without_any_rate_there_is_no_number() -> None:
    assert prefill_backlog_s(3000, [worker(1000.0), worker(None)]) == 3.0
    assert prefill_backlog_s(3000, [worker(None)]) is None
    assert prefill_backlog_s(3000, []) is None


def test_a_worker_that_decodes_prefills_more_slowly() -> None:
    assert prefill_backlog_s(3000, [worker(1000.0, while_decoding=300.0)]) == 10.0
