"""Metrics as a table and as JSON."""

from __future__ import annotations

import json

from pdserve.cli.bench.metrics import METRICS, summarize
from pdserve.cli.bench.report import details, figures, table
from pdserve.cli.bench.workload import BenchResult, RequestFailure, RequestRecord

GOOD = RequestRecord(start_s=0.0, end_s=0.3, arrivals_s=(0.1, 0.2, 0.3), input_tokens=10, output_tokens=3, text="a b c")
BAD = RequestRecord(start_s=0.5, end_s=0.6, failure=RequestFailure(reason="HTTP 429", message="later"))
RESULT = BenchResult(duration_s=2.0, records=(GOOD, BAD))

TABLE = """\
============ Serving Benchmark Result ============
Successful requests:                     1
Failed requests:                         1
  HTTP 429:                              1
Maximum request concurrency:             8
Request rate configured (RPS):           2.50
Benchmark duration (s):                  2.00
Total input tokens:                      10
Total generated tokens:                  3
Request throughput (req/s):              0.50
Request goodput (req/s):                 0.50
Output token throughput (tok/s):         1.50
Peak output token throughput (tok/s):    3.00
Peak concurrent requests:                1
Total token throughput (tok/s):          6.50
---------------Time to First Token----------------
Mean TTFT (ms):                          100.00
Median TTFT (ms):                        100.00
P50 TTFT (ms):                           100.00
P99.9 TTFT (ms):                         100.00
Max TTFT (ms):                           100.00
---------------Inter-token Latency----------------
Mean ITL (ms):                           100.00
Median ITL (ms):                         100.00
P50 ITL (ms):                            100.00
P99.9 ITL (ms):                          100.00
Max ITL (ms):                            100.00
=================================================="""


def test_the_table_has_the_layout_of_vllm_bench_serve() -> None:
    metrics = summarize(RESULT, percentiles=(50.0, 99.9), goodput_ms={"ttft": 500.0})
    lines = table(metrics, latencies=("ttft", "itl"), request_rate=2.5, max_concurrency=8).splitlines()
    assert lines == TABLE.splitlines()


def test_the_table_omits_latencies_that_were_not_requested() -> None:
    lines = table(summarize(RESULT), latencies=()).splitlines()
    assert not [line for line in lines if "goodput" in line or "concurrency" in line or "configured" in line]


def test_a_latency_without_samples_is_shown_as_such() -> None:
    metrics = summarize(BenchResult(duration_s=1.0, records=(BAD,)))
    assert "TTFT (ms):                               no samples" in table(metrics, latencies=("ttft",))
    assert figures(metrics)["mean_ttft_ms"] is None
    assert json.dumps(figures(metrics), allow_nan=False)


def test_json_has_the_keys_that_scripts_read() -> None:
    values = figures(summarize(RESULT, percentiles=(90.0, 99.0)))
    expected = {f"{kind}_{metric}_ms" for kind in ("mean", "median", "std", "p90", "p99") for metric in METRICS} | {
        "duration",
        "completed",
        "failed",
        "total_input_tokens",
        "total_output_tokens",
        "request_throughput",
        "request_goodput",
        "output_throughput",
        "total_token_throughput",
        "max_output_tokens_per_s",
        "max_concurrent_requests",
    }
    assert set(values) == expected | {"failures"} | {f"max_{metric}_ms" for metric in METRICS}
    assert (values["completed"], values["failed"], values["failures"]) == (1, 1, {"HTTP 429": 1})


def test_details_have_an_entry_for_every_request() -> None:
    values = details(RESULT)
    assert {len(column) for column in values.values()} == {2}
    assert values["ttfts"] == [0.1, None]
    assert values["itls"][1] == []
    assert values["start_times"] == [0.0, 0.5]
    assert values["generated_texts"] == ["a b c", ""]
    assert values["errors"] == ["", "HTTP 429: later"]
