"""The autoscaler's arithmetic that the replay uses, on cases worked out by hand."""

from __future__ import annotations

import pytest

from tests.deploy.autoscaling.hpa import SYNC_S, Autoscaler, Direction, Policy, replay


def policy(kind: str, value: int, period_s: float) -> Policy:
    return Policy(kind=kind, value=value, period_s=period_s)


def autoscaler(replicas: int = 1, *, target: float = 1.5, up: Direction | None = None) -> Autoscaler:
    """At most 2 up a minute, or half as many again; at most 1 down in two minutes, when 5 minutes agree."""
    default_up = Direction(window_s=0, select="Max", policies=(policy("Pods", 2, 60), policy("Percent", 50, 60)))
    down = Direction(window_s=300, select="Max", policies=(policy("Pods", 1, 120),))
    return Autoscaler(target=target, minimum=1, maximum=10, up=up or default_up, down=down, replicas=replicas)


def steps(*values: float | None) -> list[tuple[float, float | None]]:
    return [(SYNC_S * number, value) for number, value in enumerate(values)]


@pytest.mark.parametrize(("value", "replicas"), [(3.0, 2), (3.2, 2), (2.8, 2), (3.31, 3)])
def test_a_sum_within_a_tenth_of_the_target_changes_nothing(value: float, replicas: int) -> None:
    assert autoscaler(2).sync(0.0, value) == replicas


def test_a_large_backlog_raises_replicas_as_fast_as_the_policy_allows() -> None:
    # From 6 on, half as many again is more than two.
    assert replay(autoscaler(), steps(*[30.0] * 13))[::4] == [3, 5, 8, 10]


def test_replicas_fall_one_at_a_time_once_the_whole_window_agrees() -> None:
    scaler = autoscaler(3)
    replicas = replay(scaler, steps(*[4.5], *[0.0] * 40))
    first = replicas.index(2)
    assert first * SYNC_S == 300
    assert (replicas.index(1) - first) * SYNC_S == 120


def test_a_short_lull_takes_no_replica_away() -> None:
    assert set(replay(autoscaler(3), steps(*[4.5, 0.0, 0.0, 4.5] * 10))) == {3}


def test_no_value_changes_nothing() -> None:
    assert replay(autoscaler(3), steps(*[None] * 40)) == [3] * 40


def test_a_window_for_scaling_up_ignores_a_spike() -> None:
    slow = Direction(window_s=60, select="Max", policies=(policy("Pods", 2, 60),))
    assert replay(autoscaler(up=slow), steps(0.5, 30.0, 0.5, 0.5, 0.5, 0.5)) == [1] * 6
    assert replay(autoscaler(up=slow), steps(0.5, *[30.0] * 6))[-1] == 3


def test_the_strictest_policy_can_be_selected() -> None:
    strict = Direction(window_s=0, select="Min", policies=(policy("Pods", 4, 60), policy("Percent", 50, 60)))
    assert autoscaler(2, up=strict).sync(0.0, 30.0) == 3


def test_replicas_stay_within_their_bounds() -> None:
    scaler = autoscaler(9)
    assert scaler.sync(0.0, 1000.0) == 10
    assert replay(autoscaler(1), steps(*[0.0] * 30))[-1] == 1
