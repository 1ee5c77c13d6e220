"""Series of the router: their labels, and that they exist before anything has happened."""

from __future__ import annotations

import pytest

from router_svc.records.metrics import RouterMetrics


def samples(metrics: RouterMetrics, name: str, **labels: str) -> list[float]:
    return [
        sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name == f"pdserve_{name}" and labels.items() <= sample.labels.items()
    ]


def test_every_series_has_the_model_and_a_tier() -> None:
    metrics = RouterMetrics(model_name="m")
    metrics.watch_degraded({})
    found = {
        (sample.labels.get("model_name"), sample.labels.get("tier"))
        for family in metrics.registry.collect()
        if family.name.startswith("pdserve_")
        for sample in family.samples
    }
    assert found == {("m", "router"), ("m", "prefill"), ("m", "decode")}


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("admission_rejections_total", {"reason": "queue_full"}),
        ("admission_rejections_total", {"reason": "quarantined"}),
        ("request_outcomes_total", {"outcome": "failed"}),
        ("request_success_total", {"finished_reason": "length"}),
        ("request_retries_total", {"reason": "peer_lost"}),
        ("prefill_fallbacks_total", {"reason": "no_prefill_worker"}),
        ("prefill_fallbacks_total", {"reason": "layout_mismatch"}),
        ("prefill_fallbacks_total", {"reason": "quarantine"}),
        ("prefills_total", {"tier": "decode"}),
        ("local_prefills_total", {"reason": "load"}),
        ("requests_received_total", {"tier": "router"}),
        ("request_phase_seconds_count", {"phase": "wire"}),
    ],
)
def test_a_counter_is_0_before_its_first_event(name: str, labels: dict[str, str]) -> None:
    assert samples(RouterMetrics(model_name="m"), name, **labels) == [0.0]


def test_arrivals_are_counted_with_their_tokens() -> None:
    metrics = RouterMetrics(model_name="m")
    metrics.received([100, 50], [20, 50])
    assert samples(metrics, "requests_received_total") == [2.0]
    assert samples(metrics, "received_prompt_tokens_total") == [150.0]
    assert samples(metrics, "received_uncached_tokens_total") == [70.0]
