"""Which times without tokens are pauses, and why; and how they are counted."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from pdserve.base.ids import WorkerId
from router_svc.records.event_log import EventLog
from router_svc.records.events import MoveStarted, Retried, StallReason, WentOn
from router_svc.records.families import Families
from router_svc.records.pause_metrics import PauseMetrics
from router_svc.records.pauses import STALL_S, LastTokens, Pause, pause_behind, pauses_of

RETRY = Retried(reason="peer_lost", worker=WorkerId("d"), error="Lost")
MOVE = MoveStarted(number=1, reason="drain", source=WorkerId("d"), target=WorkerId("e"), is_copied=True)


def value(registry: CollectorRegistry, name: str, **labels: str) -> float:
    found = registry.get_sample_value(f"pdserve_{name}", {"model_name": "m", "tier": "router", **labels})
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("error", "seconds", "is_moving", "reason", "stall"),
    [
        ("", STALL_S / 2, True, None, None),
        ("", STALL_S, True, "move", StallReason.MOVE),
        ("", STALL_S, False, "other", StallReason.OTHER),
        ("peer_lost", STALL_S / 2, False, "peer_lost", None),
        ("peer_lost", STALL_S, True, "peer_lost", StallReason.RECOVERY),
    ],
)
def test_pauses_have_a_reason(
    error: str, seconds: float, is_moving: bool, reason: str | None, stall: StallReason | None
) -> None:
    registry, log = CollectorRegistry(), EventLog()
    metrics = PauseMetrics(Families(registry, "m"), ["peer_lost"], (1.0,))
    if is_moving:
        log.append(MOVE, at=1.0, attempt=1)
    last = LastTokens(at=3.0, completion_tokens=7, num_events=log.total)
    if error:
        log.append(RETRY, at=3.1, attempt=1)
    if (pause := pause_behind(last, log, 3.0 + seconds)) is not None:
        metrics.went_on(pause)
        log.append(pause, at=3.0 + seconds, attempt=1)
    expected = [] if reason is None else [Pause(at=3.0, seconds=seconds, completion_tokens=7, reason=reason)]
    assert pauses_of(log) == expected
    assert value(registry, "recoveries_total", reason="peer_lost") == bool(error)
    assert value(registry, "stream_pause_seconds_count") == bool(error)
    stalls = {each: value(registry, "stream_stalls_total", reason=each) for each in StallReason}
    assert stalls == {each: each == stall for each in StallReason}


def test_a_failure_is_behind_one_pause() -> None:
    """Fails if a failure before the last tokens explains the next pause, as after a stream was resumed elsewhere."""
    log = EventLog()
    log.append(RETRY, at=1.0, attempt=1)
    last = LastTokens(at=2.0, completion_tokens=7, num_events=log.total)
    assert pause_behind(last, log, 2.5) is None
    assert pause_behind(last, log, 2.0 + STALL_S) == WentOn(
        since=2.0, seconds=STALL_S, completion_tokens=7, error="", stall=StallReason.OTHER
    )
