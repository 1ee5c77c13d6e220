"""Which times without tokens are pauses, and why."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from router_svc.records.families import Families
from router_svc.records.pause_metrics import PauseMetrics
from router_svc.records.pauses import MAX_PAUSES, STALL_S, Pause, Pauses


def made() -> tuple[Pauses, list[Pause], CollectorRegistry]:
    registry, noted = CollectorRegistry(), list[Pause]()
    return Pauses(PauseMetrics(Families(registry, "m"), ["peer_lost"], (1.0,)), noted), noted, registry


def value(registry: CollectorRegistry, name: str, **labels: str) -> float:
    found = registry.get_sample_value(f"pdserve_{name}", {"model_name": "m", "tier": "router", **labels})
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("error", "seconds", "is_moving", "reason", "stall"),
    [
        ("", STALL_S / 2, True, None, None),
        ("", STALL_S, True, "move", "move"),
        ("", STALL_S, False, "other", "other"),
        ("peer_lost", STALL_S / 2, False, "peer_lost", None),
        ("peer_lost", STALL_S, True, "peer_lost", "recovery"),
    ],
)
def test_pauses_have_a_reason(
    error: str, seconds: float, is_moving: bool, reason: str | None, stall: str | None
) -> None:
    pauses, noted, registry = made()
    pauses.error = error
    pauses.went_on(3.0, seconds, 7, is_moving=is_moving)
    expected = [] if reason is None else [Pause(at=3.0, seconds=seconds, completion_tokens=7, reason=reason)]
    assert noted == expected
    assert value(registry, "recoveries_total", reason="peer_lost") == bool(error)
    assert value(registry, "stream_pause_seconds_count") == bool(error)
    stalls = {each: value(registry, "stream_stalls_total", reason=each) for each in ("recovery", "move", "other")}
    assert stalls == {each: each == stall for each in stalls}


def test_a_failure_is_behind_one_pause_and_the_list_has_a_limit() -> None:
    pauses, noted, registry = made()
    pauses.error = "peer_lost"
    for index in range(MAX_PAUSES + 2):
        pauses.went_on(index, STALL_S, index, is_moving=False)
    assert [pause.reason for pause in noted] == ["peer_lost", *["other"] * (MAX_PAUSES - 1)]
    assert value(registry, "stream_stalls_total", reason="other") == MAX_PAUSES + 1
