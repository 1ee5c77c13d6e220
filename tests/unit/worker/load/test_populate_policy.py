"""When a piece is populated: at rest without limits, at work never."""

from __future__ import annotations

from pdserve.worker.load.populate_policy import QUIET_S, PopulatePolicy


def test_nothing_is_populated_while_a_worker_has_work() -> None:
    policy = PopulatePolicy(0.0)
    assert not any(policy.may_populate(0.1 * step, is_busy=True) for step in range(100))


def test_a_machine_at_rest_is_populated_without_pauses() -> None:
    policy = PopulatePolicy(0.0)
    assert not policy.may_populate(QUIET_S - 0.01, is_busy=False)
    assert all(policy.may_populate(QUIET_S, is_busy=False) for _ in range(5))


def test_any_work_starts_the_quiet_time_again() -> None:
    policy = PopulatePolicy(0.0)
    assert not policy.may_populate(10.0, is_busy=True)
    assert not policy.may_populate(10.0 + QUIET_S - 0.01, is_busy=False)
    assert policy.may_populate(10.0 + QUIET_S, is_busy=False)
