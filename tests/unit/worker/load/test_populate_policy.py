"""When a piece is populated: at rest without limits, at work just ahead of use."""

from __future__ import annotations

from pdserve.worker.load.populate_policy import AHEAD_BYTES, INTERVAL_S, QUIET_S, PopulatePolicy

ENOUGH = AHEAD_BYTES


def test_nothing_is_populated_while_a_worker_has_work_and_enough_is_ahead() -> None:
    policy = PopulatePolicy(0.0)
    times = [0.1 * step for step in range(100)]
    assert not any(policy.may_populate(now, is_busy=True, bytes_ahead=ENOUGH) for now in times)


def test_a_machine_at_rest_is_populated_without_pauses() -> None:
    policy = PopulatePolicy(0.0)
    assert not policy.may_populate(QUIET_S - 0.01, is_busy=False, bytes_ahead=ENOUGH)
    assert all(policy.may_populate(QUIET_S, is_busy=False, bytes_ahead=ENOUGH) for _ in range(5))


def test_any_work_starts_the_quiet_time_again() -> None:
    policy = PopulatePolicy(0.0)
    assert not policy.may_populate(10.0, is_busy=True, bytes_ahead=ENOUGH)
    assert not policy.may_populate(10.0 + QUIET_S - 0.01, is_busy=False, bytes_ahead=ENOUGH)
    assert policy.may_populate(10.0 + QUIET_S, is_busy=False, bytes_ahead=ENOUGH)


def test_at_work_pieces_that_are_needed_soon_come_at_intervals() -> None:
    policy = PopulatePolicy(0.0)
    needed = ENOUGH - 1
    assert not policy.may_populate(INTERVAL_S / 2, is_busy=True, bytes_ahead=needed)
    assert policy.may_populate(INTERVAL_S, is_busy=True, bytes_ahead=needed)
    assert not policy.may_populate(INTERVAL_S * 1.5, is_busy=True, bytes_ahead=needed)
    assert policy.may_populate(INTERVAL_S * 2, is_busy=True, bytes_ahead=-ENOUGH)
