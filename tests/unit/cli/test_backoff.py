"""The delay before a restart."""

from __future__ import annotations

from pdserve.cli.supervisor.backoff import BackoffPolicy


def test_rapid_deaths_double_the_delay_up_to_its_limit() -> None:
    policy = BackoffPolicy()
    delays = []
    delay: float | None = None
    for _ in range(7):
        delay = policy.delay_s(delay, ran_s=1.0)
        delays.append(delay)
    assert delays == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]


def test_a_long_run_resets_the_delay() -> None:
    policy = BackoffPolicy()
    assert policy.delay_s(8.0, ran_s=29.9) == 10.0
    assert policy.delay_s(8.0, ran_s=30.0) == 0.5
