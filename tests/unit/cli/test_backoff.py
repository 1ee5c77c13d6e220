"""The delay before a restart."""

from __future__ import annotations

from pdserve.cli.supervisor.backoff import BackoffPolicy


def _delays(*served: float | None) -> list[float]:
    policy = BackoffPolicy()
    delays: list[float] = []
    for served_s in served:
        delays.append(policy.delay_s(delays[-1] if delays else None, served_s))
    return delays


def test_a_process_that_served_is_restarted_at_once() -> None:
    assert _delays(1.0) == [0.0]
    assert _delays(5.0, 5.0, 5.0) == [0.0, 0.0, 0.0]


def test_rapid_deaths_double_the_delay_up_to_its_limit() -> None:
    assert _delays(1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0) == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]


def test_a_process_that_cannot_start_waits_from_the_first_time_on() -> None:
    assert _delays(60.0, None, None, None) == [0.0, 0.5, 1.0, 2.0]
    assert _delays(None, None) == [0.5, 1.0]


def test_a_stable_run_resets_the_delay() -> None:
    policy = BackoffPolicy()
    assert policy.delay_s(8.0, served_s=4.9) == 10.0
    assert policy.delay_s(8.0, served_s=5.0) == 0.0
