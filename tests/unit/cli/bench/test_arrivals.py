"""Send times of requests."""

from __future__ import annotations

import math
import statistics
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.cli.bench.arrivals import EXPONENTIAL, LINEAR, ramp, steady

#: Burstiness at which gaps equal their mean to five digits.
EVEN = 1e12


def _gaps(times: list[float]) -> list[float]:
    return [later - earlier for earlier, later in pairwise(times)]


def _variation(gaps: list[float]) -> float:
    return statistics.pstdev(gaps) / statistics.fmean(gaps)


def test_an_infinite_rate_sends_all_at_once() -> None:
    assert steady(3, math.inf) == [0.0, 0.0, 0.0]


@settings(deadline=None)
@given(
    count=st.integers(1, 50),
    rate=st.floats(0.01, 1e4),
    burstiness=st.floats(0.05, 100),
    seed=st.integers(0, 1000),
)
def test_times_ascend_from_zero_at_the_requested_rate(count: int, rate: float, burstiness: float, seed: int) -> None:
    times = steady(count, rate, burstiness=burstiness, seed=seed)
    assert len(times) == count
    assert times[0] == 0.0
    assert times == sorted(times)
    assert times[-1] == pytest.approx((count - 1) / rate)


def test_a_seed_gives_the_same_times_and_another_gives_others() -> None:
    assert steady(20, 3.0, seed=1) == steady(20, 3.0, seed=1)
    assert steady(20, 3.0, seed=1) != steady(20, 3.0, seed=2)


@pytest.mark.parametrize(("burstiness", "variation"), [(1.0, 1.0), (0.25, 2.0), (4.0, 0.5)])
def test_gaps_vary_like_a_gamma_distribution_of_that_shape(burstiness: float, variation: float) -> None:
    assert _variation(_gaps(steady(20_000, 5.0, burstiness=burstiness))) == pytest.approx(variation, rel=0.05)


@pytest.mark.parametrize(
    ("strategy", "rates"), [(LINEAR, [1.0, 2.5, 4.0]), (EXPONENTIAL, [1.0, 2.0, 4.0])], ids=[LINEAR, EXPONENTIAL]
)
def test_a_ramp_goes_from_its_start_to_its_end(strategy: str, rates: list[float]) -> None:
    times = ramp(4, 1.0, 4.0, strategy=strategy, burstiness=EVEN)
    assert times[0] == 0.0
    assert [1 / gap for gap in _gaps(times)] == pytest.approx(rates, rel=1e-4)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_ramp_of_a_few_requests_has_a_time_for_each(count: int) -> None:
    assert len(ramp(count, 1.0, 2.0, strategy=LINEAR)) == count
