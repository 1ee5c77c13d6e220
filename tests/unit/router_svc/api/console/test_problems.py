"""What the console reports as wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pdserve.peers.workers import Tier, TransportReport, WorkerLoad, WorkerRecord
from router_svc.api.console.load import load_of
from router_svc.api.console.problems import Observed, Problem, find_problems
from tests.support.records import worker_record
from tests.unit.router_svc.api.console.test_load import sample

TIERS: tuple[Tier, ...] = ("prefill", "decode")
ONE_OF_EACH = (worker_record("prefill-0", tier="prefill"), worker_record("decode-0"))


def problems(*workers: WorkerRecord, **changes: Any) -> list[Problem]:
    """Problems of a cluster that has these workers and is otherwise well."""
    observed = Observed(
        status="ready",
        reason=None,
        degraded={},
        models=["tiny"],
        expects_prefill=True,
        workers=workers,
        tiers={tier: load_of([worker for worker in workers if worker.tier == tier]) for tier in TIERS},
        queued=0,
        max_queued=512,
        history=[sample(at) for at in range(12)],
        ended=0,
        failed=0,
        last_error="",
    )
    return find_problems(replace(observed, **changes))


def only(found: list[Problem]) -> Problem:
    [problem] = found
    return problem


def test_a_healthy_cluster_has_no_problem() -> None:
    assert problems(*ONE_OF_EACH) == []


@pytest.mark.parametrize(
    ("workers", "words"),
    [
        ((worker_record("prefill-0", tier="prefill"),), "No decode worker is registered."),
        ((worker_record("decode-0", ready=False),), "1 decode worker is registered, none ready."),
    ],
)
def test_without_decode_workers_requests_are_refused(workers: tuple[WorkerRecord, ...], words: str) -> None:
    problem = only(problems(*workers, status="not_ready", reason="no decode worker is ready"))
    assert problem.severity == "critical"
    assert "503" in problem.title
    assert words in problem.text


def test_a_draining_router_is_critical_and_not_confused_with_a_missing_tier() -> None:
    problem = only(problems(*ONE_OF_EACH, status="not_ready", reason="draining"))
    assert problem.title == "This router is draining"


def test_a_missing_prefill_tier_is_reported_once_and_only_where_it_is_expected() -> None:
    decode = worker_record("decode-0")
    degraded = {"prefill": "no prefill worker is ready; decode workers prefill"}
    problem = only(problems(decode, degraded=degraded))
    assert (problem.severity, problem.title) == ("critical", "The prefill tier is missing")
    assert problems(decode, expects_prefill=False) == []


def test_degraded_subjects_have_their_reasons() -> None:
    found = problems(*ONE_OF_EACH, degraded={"redis": "connection refused", "transport": "tcp within a host"})
    assert [(each.severity, each.title) for each in found] == [
        ("warning", "Redis is not available"),
        ("warning", "Degraded: transport"),
    ]
    assert found[0].text == "Connection refused."


def test_a_queue_that_grows_is_reported_with_its_numbers() -> None:
    growing = [sample(at, queued=2 * at) for at in range(12)]
    problem = only(problems(*ONE_OF_EACH, queued=22, history=growing))
    assert problem.title == "The queue is growing"
    assert "22 prompts wait for admission, 2 a minute ago; the limit is 512" in problem.text


@pytest.mark.parametrize(
    ("queued", "lengths"),
    [
        (7, [0] * 9 + [7] * 3),  # short
        (30, [30] * 12),  # long, but steady
        (9, [20] * 6 + [9] * 6),  # shrinking
        (0, [50] * 12),  # gone
        (9, [9]),  # nothing to compare with yet
    ],
)
def test_a_queue_that_does_not_grow_is_no_problem(queued: int, lengths: list[int]) -> None:
    history = [sample(at, queued=length) for at, length in enumerate(lengths)]
    assert problems(*ONE_OF_EACH, queued=queued, history=history) == []


def test_a_nearly_full_queue_is_critical_however_it_came_about() -> None:
    problem = only(problems(*ONE_OF_EACH, queued=410, history=[sample(at, queued=410) for at in range(12)]))
    assert (problem.severity, problem.title) == ("critical", "The queue is nearly full")
    assert "from 512 on, requests get 429" in problem.text


def test_used_up_blocks_name_the_tier() -> None:
    full = replace(ONE_OF_EACH[1], load=WorkerLoad(running=8, waiting=3, free_blocks=2))
    problem = only(problems(ONE_OF_EACH[0], full))
    assert problem.title == "KV blocks of the decode tier are used up"
    assert "98% of the decode tier's 100 KV blocks are in use; 3 requests wait" in problem.text


@pytest.mark.parametrize(
    ("ended", "failed", "is_reported"), [(100, 5, True), (3, 3, True), (2, 2, False), (100, 4, False)]
)
def test_failures_are_reported_from_a_share_on(ended: int, failed: int, is_reported: bool) -> None:
    found = problems(*ONE_OF_EACH, ended=ended, failed=failed, last_error="worker lost")
    assert bool(found) is is_reported
    if found:
        assert f"{failed} of the last {ended} requests failed. The latest: Worker lost." in only(found).text


def test_workers_that_are_not_ready_are_named_up_to_three() -> None:
    workers = [worker_record(f"decode-{index}", ready=index < 2) for index in range(7)]
    problem = only(problems(ONE_OF_EACH[0], *workers))
    assert problem.title == "5 of 7 decode workers are not ready"
    assert problem.text == "Loading or draining: decode-2, decode-3, decode-4 and 2 more."


def test_workers_of_another_model_are_reported() -> None:
    other = replace(worker_record("decode-9"), model="large")
    problem = only(problems(*ONE_OF_EACH, workers=(*ONE_OF_EACH, other)))
    assert problem.title == "1 worker serves another model"
    assert "'large'" in problem.text


def test_a_slow_path_of_blocks_is_reported_with_its_cause() -> None:
    report = TransportReport(paths={"tcp": 1}, degraded="tcp instead of cma: other IPC namespace")
    slow = replace(ONE_OF_EACH[0], transport=report)
    problem = only(problems(slow, ONE_OF_EACH[1]))
    assert problem.title == "KV blocks take a slow path on 1 worker"
    assert problem.text == "prefill-0: Tcp instead of cma: other IPC namespace."


def test_critical_problems_come_first() -> None:
    found = problems(worker_record("decode-0"), worker_record("decode-1", ready=False))
    assert [each.severity for each in found] == ["critical", "warning"]
