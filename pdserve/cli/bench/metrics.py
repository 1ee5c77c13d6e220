"""Computes the metrics of a run from the records of its requests. Pure; names follow `vllm bench serve`."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pdserve.cli.bench.workload import BenchResult, RequestRecord

TTFT, TPOT, ITL, E2EL = METRICS = ("ttft", "tpot", "itl", "e2el")
#: Metrics that can be an objective. A request has many ITLs, so ITL is not one.
GOODPUT_METRICS = (TTFT, TPOT, E2EL)
DEFAULT_PERCENTILES = (50.0, 90.0, 99.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """A latency in milliseconds over all samples of a run; `percentiles_ms` is keyed by percent."""

    mean_ms: float
    median_ms: float
    std_ms: float
    max_ms: float
    percentiles_ms: Mapping[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """The metrics of a run. Latencies cover the completed requests; `latencies` omits those without samples.

    `request_goodput`: completed requests per second that met all objectives; None without objectives.
    `failures`: number of failed requests by reason.
    """

    duration_s: float
    completed: int
    failed: int
    failures: Mapping[str, int]
    total_input_tokens: int
    total_output_tokens: int
    request_goodput: float | None
    max_output_tokens_per_s: float
    max_concurrent_requests: int
    latencies: Mapping[str, Distribution]

    @property
    def request_throughput(self) -> float:
        """Completed requests per second."""
        return self.completed / self.duration_s

    @property
    def output_throughput(self) -> float:
        """Generated tokens per second."""
        return self.total_output_tokens / self.duration_s

    @property
    def total_token_throughput(self) -> float:
        """Tokens of prompts and completions per second."""
        return (self.total_input_tokens + self.total_output_tokens) / self.duration_s


def summarize(
    result: BenchResult,
    *,
    percentiles: Sequence[float] = DEFAULT_PERCENTILES,
    goodput_ms: Mapping[str, float] | None = None,
) -> Metrics:
    """The metrics of a run; `goodput_ms` holds objectives in milliseconds by metric (`ttft`, `tpot`, `e2el`)."""
    completed = result.completed
    good = sum(_meets(record, goodput_ms) for record in completed) if goodput_ms else None
    samples_s = {metric: _samples_s(metric, completed) for metric in METRICS}
    return Metrics(
        duration_s=result.duration_s,
        completed=len(completed),
        failed=len(result.failures),
        failures=dict(Counter(failure.reason for failure in result.failures).most_common()),
        total_input_tokens=sum(record.input_tokens for record in completed),
        total_output_tokens=sum(record.output_tokens for record in completed),
        request_goodput=None if good is None else good / result.duration_s,
        max_output_tokens_per_s=_peak_output_per_s(completed),
        max_concurrent_requests=_peak_concurrency(result.records),
        latencies={metric: _distribution(samples, percentiles) for metric, samples in samples_s.items() if samples},
    )


def percentile(ascending: Sequence[float], percent: float) -> float:
    """The percentile of ascending values, interpolated linearly between neighbors."""
    position = (len(ascending) - 1) * percent / 100
    below = math.floor(position)
    above = min(below + 1, len(ascending) - 1)
    return ascending[below] + (ascending[above] - ascending[below]) * (position - below)


def _samples_s(metric: str, records: Sequence[RequestRecord]) -> list[float]:
    if metric == ITL:
        return [itl for record in records for itl in record.itls_s]
    return [value for record in records if (value := _latency_s(metric, record)) is not None]


def _latency_s(metric: str, record: RequestRecord) -> float | None:
    return {TTFT: record.ttft_s, TPOT: record.tpot_s, E2EL: record.e2el_s}[metric]


def _meets(record: RequestRecord, goodput_ms: Mapping[str, float]) -> bool:
    """Whether a request meets all objectives. One with a single token has no TPOT and meets any."""
    return all((_latency_s(metric, record) or 0.0) * 1000 <= bound for metric, bound in goodput_ms.items())


def _distribution(samples_s: Sequence[float], percentiles: Sequence[float]) -> Distribution:
    ascending = sorted(sample * 1000 for sample in samples_s)
    mean_ms = statistics.fmean(ascending)
    return Distribution(
        mean_ms=mean_ms,
        median_ms=percentile(ascending, 50),
        std_ms=math.sqrt(statistics.fmean((sample - mean_ms) ** 2 for sample in ascending)),
        max_ms=ascending[-1],
        percentiles_ms={percent: percentile(ascending, percent) for percent in percentiles},
    )


def _peak_output_per_s(records: Sequence[RequestRecord]) -> float:
    """Maximum tokens within a second of the run; a stream's tokens are spread evenly over its arrivals."""
    tokens: dict[int, float] = {}
    for record in records:
        per_arrival = record.output_tokens / len(record.arrivals_s)
        seconds = Counter(int(record.start_s + at_s) for at_s in record.arrivals_s)
        for second, count in seconds.items():
            tokens[second] = tokens.get(second, 0.0) + count * per_arrival
    return max(tokens.values(), default=0.0)


def _peak_concurrency(records: Sequence[RequestRecord]) -> int:
    """Maximum concurrent requests. A request that ends when another starts does not overlap it."""
    changes = sorted(
        change for record in records for change in ((record.start_s, 1), (record.start_s + record.end_s, -1))
    )
    running = peak = 0
    for _, change in changes:
        running += change
        peak = max(peak, running)
    return peak
