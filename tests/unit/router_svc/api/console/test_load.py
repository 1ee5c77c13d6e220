"""Loads of tiers and their course."""

from __future__ import annotations

from dataclasses import replace

from pdserve.peers.workers import WorkerLoad
from router_svc.api.console.load import COLUMNS, LoadHistory, LoadSample, load_of
from tests.support.records import worker_record


def sample(at: float, **values: float) -> LoadSample:
    return LoadSample(at=at, **(dict.fromkeys(COLUMNS[1:], 0) | values))  # type: ignore[arg-type]


def test_only_ready_workers_have_load() -> None:
    busy = replace(worker_record("decode-0"), load=WorkerLoad(running=3, waiting=1, queued_tokens=7, free_blocks=25))
    loading = worker_record("decode-1", ready=False)
    load = load_of([busy, loading])
    assert (load.workers, load.ready, load.running, load.waiting, load.queued_tokens) == (2, 1, 3, 1, 7)
    assert load.kv_use == 0.75
    assert load.as_json()["total_blocks"] == 100


def test_a_tier_without_workers_uses_nothing() -> None:
    assert load_of([]).kv_use == 0.0


def test_the_history_is_bounded_and_keeps_the_latest() -> None:
    history = LoadHistory(3)
    for at in range(5):
        history.add(sample(at, queued=at))
    assert [row[0] for row in history.as_json()["rows"]] == [2, 3, 4]  # type: ignore[index, union-attr]
    assert [each.queued for each in history.since(3)] == [3, 4]
    assert history.as_json()["columns"] == [*COLUMNS]
