"""The router's counters exist before their first event."""

from __future__ import annotations

import pytest

from pdserve.base.errors import PeerLost, reason_of
from router_svc.records.metrics import RouterMetrics


@pytest.mark.parametrize(
    ("name", "label", "value"),
    [
        ("admission_rejections", "reason", "queue_full"),
        ("request_outcomes", "outcome", "failed"),
        ("request_success", "finished_reason", "stop"),
        ("request_retries", "reason", reason_of(PeerLost("gone"))),
        ("prefill_fallbacks", "reason", "no_prefill_worker"),
        ("prefills", "tier", "prefill"),
        ("local_prefills", "reason", "short"),
    ],
)
def test_counters_start_at_zero(name: str, label: str, value: str) -> None:
    metrics = RouterMetrics(model_name="m")
    samples = [
        sample
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name == f"pdserve_{name}_total" and sample.labels[label] == value
    ]
    assert [sample.value for sample in samples] == [0]
