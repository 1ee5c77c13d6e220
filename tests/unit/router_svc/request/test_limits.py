"""Token buckets as values: what a request needs, what is left, and what headers say of it."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router_svc.clients.keys import parse_keys
from router_svc.request.limits import (
    Limit,
    Limits,
    duration,
    full,
    period_starts,
    rate_headers,
    refilled,
    reserve,
    settled,
    size,
)

MINUTE = Limits(requests_per_minute=2, tokens_per_minute=600)


def test_a_minute_of_requests_may_come_at_once_and_the_next_when_one_has_filled_again() -> None:
    first = reserve(full(MINUTE, 0.0), MINUTE, 1, 0, 0.0)
    second = reserve(first.bucket, MINUTE, 1, 0, 0.0)
    third = reserve(second.bucket, MINUTE, 1, 0, 0.0)
    assert (first.refused_by, second.refused_by, third.refused_by) == (None, None, Limit.REQUESTS)
    assert third.wait_s == pytest.approx(30.0)
    assert reserve(third.bucket, MINUTE, 1, 0, third.wait_s).refused_by is None


def test_a_request_waits_for_its_tokens_and_one_larger_than_a_minute_for_a_full_bucket() -> None:
    half = reserve(full(MINUTE, 0.0), MINUTE, 300, 0, 0.0).bucket
    refused = reserve(half, MINUTE, 400, 0, 0.0)
    assert (refused.refused_by, refused.wait_s) == (Limit.TOKENS, pytest.approx(10.0))
    large = reserve(half, MINUTE, 10_000, 0, 30.0)
    assert large.refused_by is None
    # Its debt is paid before the next one.
    assert reserve(large.bucket, MINUTE, 1, 0, 30.0).wait_s == pytest.approx((10_000 - 600 + 1) / 10)


def test_what_was_not_used_comes_back_and_what_was_used_beyond_it_is_owed() -> None:
    reserved = reserve(full(MINUTE, 0.0), MINUTE, 300, 0, 0.0).bucket
    assert settled(reserved, MINUTE, 300, 100).tokens == 500
    assert settled(reserved, MINUTE, 300, 1000).tokens == -400


def test_parallel_requests_and_a_budget_are_limits_of_their_own() -> None:
    parallel = Limits(parallel=2)
    assert reserve(full(parallel, 0.0), parallel, 9, 1, 0.0).refused_by is None
    assert reserve(full(parallel, 0.0), parallel, 9, 2, 0.0).refused_by is Limit.PARALLEL
    budget = Limits(budget=10)
    last = reserve(full(budget, 0.0), budget, 30, 0, 0.0)
    # The last request may exceed it, and time alone brings nothing back.
    assert last.refused_by is None
    assert reserve(last.bucket, budget, 1, 0, 1e9).refused_by is Limit.BUDGET


@given(
    st.lists(
        st.tuples(st.floats(0, 40), st.integers(1, 900), st.floats(0, 1)),
        max_size=60,
    )
)
def test_no_sequence_of_requests_uses_more_than_a_full_bucket_and_its_refill(
    steps: list[tuple[float, int, float]],
) -> None:
    now, used, admitted, bucket = 0.0, 0, 0, full(MINUTE, 0.0)
    for pause, tokens, share in steps:
        now += pause
        verdict = reserve(bucket, MINUTE, tokens, 0, now)
        bucket = verdict.bucket
        if verdict.refused_by is None:
            spent = int(tokens * share)
            bucket = settled(bucket, MINUTE, tokens, spent)
            used, admitted = used + spent, admitted + 1
        else:
            assert verdict.wait_s > 0
        assert admitted <= 2 + now * 2 / 60 + 1e-6
        # A request larger than a minute may leave a debt of what exceeds it.
        assert used <= 600 + now * 600 / 60 + 300 + 1e-6


def test_a_clock_that_goes_back_fills_nothing() -> None:
    empty = reserve(full(MINUTE, 100.0), MINUTE, 600, 0, 100.0).bucket
    assert refilled(empty, MINUTE, 40.0).tokens == 0


def test_completions_are_reserved_up_to_a_bound() -> None:
    assert (size(100, 50), size(100, 10**6)) == (150, 1124)


def test_periods_are_days_and_months_of_utc() -> None:
    now = datetime(2026, 12, 31, 23, 59, tzinfo=UTC).timestamp()
    days = [datetime.fromtimestamp(at, UTC).date().isoformat() for at in period_starts("day", now)]
    assert days == ["2026-12-30", "2026-12-31", "2027-01-01", "2027-01-02"]
    months = [datetime.fromtimestamp(at, UTC).date().isoformat() for at in period_starts("month", now)]
    assert months == ["2026-11-01", "2026-12-01", "2027-01-01", "2027-02-01"]
    assert period_starts("total", now) == [0]


def test_headers_have_only_the_limits_of_the_key() -> None:
    left = reserve(full(MINUTE, 0.0), MINUTE, 60, 0, 0.0).bucket
    assert rate_headers(left, MINUTE) == {
        "x-ratelimit-limit-requests": "2",
        "x-ratelimit-remaining-requests": "1",
        "x-ratelimit-reset-requests": "30s",
        "x-ratelimit-limit-tokens": "600",
        "x-ratelimit-remaining-tokens": "540",
        "x-ratelimit-reset-tokens": "6s",
    }
    assert rate_headers(left, Limits(parallel=1)) == {}
    assert [duration(seconds) for seconds in (0.02, 1, 360)] == ["20ms", "1s", "6m0s"]


def test_limits_are_read_from_the_file_and_a_key_without_any_has_none() -> None:
    text = f'[[keys]]\nid = "a"\nsha256 = "{"0" * 64}"\nparallel = 3\nbudget = 9\nbudget_period = "day"\n'
    text += f'[[keys]]\nid = "b"\nsha256 = "{"1" * 64}"\n'
    limited, free = (key.client.limits for key in parse_keys(text, "keys.toml"))
    assert limited == Limits(parallel=3, budget=9, budget_period="day")
    assert free is None
