"""Formats the metrics of a run as a table and as JSON. Pure; rows and keys follow `vllm bench serve`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pdserve.cli.bench.metrics import E2EL, ITL, TPOT, TTFT, Metrics
from pdserve.cli.bench.workload import BenchResult

_WIDTH = 50
TITLES = {
    TTFT: "Time to First Token",
    TPOT: "Time per Output Token (excl. 1st token)",
    ITL: "Inter-token Latency",
    E2EL: "End-to-end Latency",
}


def table(
    metrics: Metrics, *, latencies: Sequence[str], request_rate: float | None = None, max_concurrency: int | None = None
) -> str:
    """The metrics as a table up to 50 columns wide, with the requested latencies."""
    lines = [f"{' Serving Benchmark Result ':=^{_WIDTH}}"]
    lines += [f"{name:<40} {value}" for name, value in _totals(metrics, request_rate, max_concurrency)]
    for metric in latencies:
        lines.append(f"{TITLES[metric]:-^{_WIDTH}}")
        lines += [f"{name:<40} {value}" for name, value in _latency_rows(metric, metrics)]
    lines.append("=" * _WIDTH)
    return "\n".join(lines)


def _totals(metrics: Metrics, request_rate: float | None, max_concurrency: int | None) -> Iterator[tuple[str, str]]:
    yield "Successful requests:", str(metrics.completed)
    yield "Failed requests:", str(metrics.failed)
    for reason, count in metrics.failures.items():
        yield f"  {reason}:", str(count)
    if max_concurrency is not None:
        yield "Maximum request concurrency:", str(max_concurrency)
    if request_rate is not None:
        yield "Request rate configured (RPS):", f"{request_rate:.2f}"
    yield "Benchmark duration (s):", f"{metrics.duration_s:.2f}"
    yield "Total input tokens:", str(metrics.total_input_tokens)
    yield "Total generated tokens:", str(metrics.total_output_tokens)
    yield "Request throughput (req/s):", f"{metrics.request_throughput:.2f}"
    if metrics.request_goodput is not None:
        yield "Request goodput (req/s):", f"{metrics.request_goodput:.2f}"
    yield "Output token throughput (tok/s):", f"{metrics.output_throughput:.2f}"
    yield "Peak output token throughput (tok/s):", f"{metrics.max_output_tokens_per_s:.2f}"
    yield "Peak concurrent requests:", str(metrics.max_concurrent_requests)
    yield "Total token throughput (tok/s):", f"{metrics.total_token_throughput:.2f}"


def _latency_rows(metric: str, metrics: Metrics) -> Iterator[tuple[str, str]]:
    name = metric.upper()
    latency = metrics.latencies.get(metric)
    if latency is None:
        yield f"{name} (ms):", "no samples"
        return
    yield f"Mean {name} (ms):", f"{latency.mean_ms:.2f}"
    yield f"Median {name} (ms):", f"{latency.median_ms:.2f}"
    for percent, value_ms in latency.percentiles_ms.items():
        yield f"P{percent:g} {name} (ms):", f"{value_ms:.2f}"
    yield f"Max {name} (ms):", f"{latency.max_ms:.2f}"


def figures(metrics: Metrics) -> dict[str, object]:
    """The metrics by JSON key; latencies without samples are null."""
    values: dict[str, object] = {
        "duration": metrics.duration_s,
        "completed": metrics.completed,
        "failed": metrics.failed,
        "failures": dict(metrics.failures),
        "total_input_tokens": metrics.total_input_tokens,
        "total_output_tokens": metrics.total_output_tokens,
        "request_throughput": metrics.request_throughput,
        "request_goodput": metrics.request_goodput,
        "output_throughput": metrics.output_throughput,
        "total_token_throughput": metrics.total_token_throughput,
        "max_output_tokens_per_s": metrics.max_output_tokens_per_s,
        "max_concurrent_requests": metrics.max_concurrent_requests,
    }
    for metric in TITLES:
        latency = metrics.latencies.get(metric)
        values[f"mean_{metric}_ms"] = latency and latency.mean_ms
        values[f"median_{metric}_ms"] = latency and latency.median_ms
        values[f"std_{metric}_ms"] = latency and latency.std_ms
        values[f"max_{metric}_ms"] = latency and latency.max_ms
        for percent, value_ms in latency.percentiles_ms.items() if latency else ():
            values[f"p{percent:g}_{metric}_ms"] = value_ms
    return values


def details(result: BenchResult) -> dict[str, object]:
    """Lists with one entry per request, in the workload's order; times in seconds."""
    records = result.records
    return {
        "input_lens": [record.input_tokens for record in records],
        "output_lens": [record.output_tokens for record in records],
        "start_times": [record.start_s for record in records],
        "ttfts": [record.arrivals_s[0] if record.arrivals_s else None for record in records],
        "itls": [list(record.itls_s) for record in records],
        "e2els": [record.e2el_s for record in records],
        "generated_texts": [record.text for record in records],
        "errors": [
            "" if record.failure is None else f"{record.failure.reason}: {record.failure.message}" for record in records
        ],
    }
