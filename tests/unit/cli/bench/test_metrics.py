"""The metrics of a run."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.cli.bench.metrics import percentile, summarize
from pdserve.cli.bench.workload import BenchResult, RequestFailure, RequestRecord


def _record(
    *arrivals_s: float, start_s: float = 0.0, tokens: int | None = None, end_s: float | None = None
) -> RequestRecord:
    return RequestRecord(
        start_s=start_s,
        end_s=arrivals_s[-1] if end_s is None else end_s,
        arrivals_s=arrivals_s,
        input_tokens=10,
        output_tokens=len(arrivals_s) if tokens is None else tokens,
    )


def _failed(reason: str, *, start_s: float = 0.0, end_s: float = 0.1) -> RequestRecord:
    return RequestRecord(
        start_s=start_s, end_s=end_s, failure=RequestFailure(reason=reason, message="no"), input_tokens=10
    )


def _result(*records: RequestRecord, duration_s: float = 2.0) -> BenchResult:
    return BenchResult(duration_s=duration_s, records=records)


@settings(deadline=None)
@given(values=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30).map(sorted), percent=st.floats(0, 100))
def test_percentiles_equal_those_of_numpy(values: list[float], percent: float) -> None:
    assert percentile(values, percent) == pytest.approx(float(np.percentile(values, percent)), abs=1e-6)


def test_latencies_cover_the_completed_requests() -> None:
    metrics = summarize(_result(_record(0.1, 0.2, 0.4), _record(0.3, 0.4), _failed("timeout", end_s=9.0)))
    latencies = metrics.latencies
    assert latencies["ttft"].mean_ms == pytest.approx(200)
    assert latencies["ttft"].std_ms == pytest.approx(100)
    assert latencies["tpot"].percentiles_ms[50.0] == pytest.approx((150 + 100) / 2)
    assert latencies["itl"].median_ms == pytest.approx(100)
    assert latencies["itl"].max_ms == pytest.approx(200)
    assert latencies["e2el"].max_ms == pytest.approx(400)


def test_throughput_counts_tokens_not_chunks() -> None:
    metrics = summarize(_result(_record(0.1, 0.2, tokens=8), _record(0.1), _failed("x"), duration_s=4.0))
    assert (metrics.completed, metrics.failed) == (2, 1)
    assert (metrics.total_input_tokens, metrics.total_output_tokens) == (20, 9)
    assert metrics.request_throughput == 0.5
    assert metrics.output_throughput == 9 / 4
    assert metrics.total_token_throughput == 29 / 4


def test_tpot_counts_tokens_where_a_chunk_has_several() -> None:
    metrics = summarize(_result(_record(1.0, 2.0, tokens=5)))
    assert metrics.latencies["tpot"].mean_ms == pytest.approx(250)
    assert metrics.latencies["itl"].mean_ms == pytest.approx(1000)


def test_a_last_chunk_without_tokens_only_sets_the_end() -> None:
    metrics = summarize(_result(_record(0.1, 0.2, end_s=0.5)))
    assert metrics.latencies["itl"].max_ms == pytest.approx(100)
    assert metrics.latencies["e2el"].max_ms == pytest.approx(500)


def test_one_token_has_neither_tpot_nor_itl() -> None:
    assert set(summarize(_result(_record(0.1))).latencies) == {"ttft", "e2el"}


def test_failures_are_counted_by_reason_in_descending_order() -> None:
    metrics = summarize(_result(_failed("timeout"), _failed("HTTP 429"), _failed("HTTP 429")))
    assert list(metrics.failures.items()) == [("HTTP 429", 2), ("timeout", 1)]
    assert metrics.latencies == {}
    assert metrics.output_throughput == metrics.max_output_tokens_per_s == 0


@pytest.mark.parametrize(
    ("objectives", "good"),
    [
        ({"ttft": 100.0}, 2),
        ({"ttft": 99.0}, 1),
        ({"tpot": 50.0}, 1),
        ({"e2el": 150.0}, 1),
        ({"ttft": 100.0, "tpot": 50.0, "e2el": 100.0}, 1),
        ({"ttft": 1.0}, 0),
    ],
)
def test_goodput_counts_requests_that_meet_all_objectives(objectives: dict[str, float], good: int) -> None:
    records = (_record(0.1, 0.2, 0.3), _record(0.05, 0.1), _failed("timeout"))
    assert summarize(_result(*records), goodput_ms=objectives).request_goodput == good / 2.0


def test_without_objectives_there_is_no_goodput() -> None:
    assert summarize(_result(_record(0.1))).request_goodput is None


def test_peak_output_is_that_of_the_best_second() -> None:
    records = (_record(0.2, 0.4, 1.1, tokens=6), _record(0.1, 0.2, start_s=1.0))
    assert summarize(_result(*records)).max_output_tokens_per_s == 4


def test_peak_concurrency_counts_overlapping_requests() -> None:
    records = (
        _record(1.0),
        _failed("x", start_s=0.5, end_s=1.0),
        _record(1.0, start_s=1.0),
        _record(1.0, start_s=3.0),
    )
    assert summarize(_result(*records)).max_concurrent_requests == 2
