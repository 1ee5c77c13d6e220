"""A worker's counters exist before their first event, and it is ready when its health says so."""

from __future__ import annotations

import math

import pytest

from pdserve.base.errors import DigestMismatch, reason_of
from pdserve.net.admin import Health
from pdserve.worker.serve.metrics import WorkerMetrics


def value(metrics: WorkerMetrics, name: str, **labels: str) -> float:
    [found] = [
        sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    return found


@pytest.mark.parametrize(
    ("tier", "outcome"),
    [
        ("prefill", "not_needed"),
        ("decode", "committed"),
        ("decode", reason_of(DigestMismatch("bytes"))),
    ],
)
def test_outcomes_of_transfers_start_at_zero(tier: str, outcome: str) -> None:
    metrics = WorkerMetrics(model_name="m", tier=tier)
    assert value(metrics, "pdserve_kv_transfers_total", outcome=outcome) == 0


def test_ready_follows_health() -> None:
    metrics, health = WorkerMetrics(model_name="m", tier="decode"), Health()
    metrics.watch(health)
    assert value(metrics, "pdserve_ready") == 0
    health.not_ready = None
    assert value(metrics, "pdserve_ready") == 1
    health.dead = "the step loop failed"
    assert value(metrics, "pdserve_ready") == 0


def test_the_last_exit_has_its_reason() -> None:
    metrics = WorkerMetrics(model_name="m", tier="decode")
    metrics.describe_last_exit("killed", "serving")
    assert value(metrics, "pdserve_last_exit_info", reason="killed", during="serving") == 1
    assert value(metrics, "pdserve_memory_available_bytes") > 0
    assert not math.isnan(value(metrics, "pdserve_start_time_seconds"))
