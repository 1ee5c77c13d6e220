"""Requests leave a worker one after the other, and faster only where the time is short."""

from __future__ import annotations

import pytest

from decode_svc.migration.drain_policy import DrainPolicy
from pdserve.base.ids import AttemptId, RequestId

STEP_S = 0.01
IDS = [AttemptId(RequestId(f"r{index:02}"), 1) for index in range(40)]


def requested(leaving: DrainPolicy, count: int, *, now: float = 0.0, tokens: int = 1000) -> list[AttemptId]:
    return leaving.next({each: tokens + index for index, each in enumerate(IDS[:count])}, step_s=STEP_S, now=now)


def test_a_worker_that_does_not_end_is_left_by_one_request_after_the_other() -> None:
    leaving = DrainPolicy(None)
    left = dict.fromkeys(IDS[:3], 5)
    for each in list(left):
        assert leaving.next(left, step_s=STEP_S, now=0.0) == [each]
        assert leaving.next(left, step_s=STEP_S, now=0.1) == [], "it is on its way"
        del left[each]
    assert leaving.next(left, step_s=STEP_S, now=0.2) == []


def test_a_request_that_stays_holds_up_the_next_for_a_while_and_is_requested_once() -> None:
    leaving = DrainPolicy(None)
    assert requested(leaving, 2) == [IDS[1]]
    assert requested(leaving, 2, now=1.9) == []
    assert requested(leaving, 2, now=2.1) == [IDS[0]]
    assert requested(leaving, 2, now=99.0) == []


@pytest.mark.parametrize(
    ("ends_at", "count", "at_once"), [(20.0, 10, 1), (15.0, 40, 3), (10.0, 40, 4), (0.1, 2, 2), (-1.0, 40, 4)]
)
def test_as_few_leave_at_a_time_as_are_gone_in_half_of_the_time(ends_at: float, count: int, at_once: int) -> None:
    assert len(requested(DrainPolicy(ends_at), count, tokens=10_000)) == at_once


def test_what_ends_in_time_stays_and_the_longest_leaves_first() -> None:
    tokens = dict(zip(IDS, (100, 5000, 499, 900), strict=False))
    assert DrainPolicy(10.0).next(tokens, step_s=STEP_S, now=0.0) == [IDS[1]]
    assert DrainPolicy(0.0).next(tokens, step_s=STEP_S, now=0.0) == [IDS[1], IDS[3], IDS[2], IDS[0]]
    assert DrainPolicy(1000.0).next(tokens, step_s=STEP_S, now=0.0) == []
