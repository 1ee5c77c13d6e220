"""`pdserve bench serve`: drives any OpenAI-compatible server and reports its latencies and throughput."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pdserve.base.config import load
from pdserve.base.errors import PdserveError, SetupError
from pdserve.cli.bench.config import SHAREGPT, ServeConfig
from pdserve.cli.bench.environment import describe_client
from pdserve.cli.bench.metrics import Metrics, summarize
from pdserve.cli.bench.plan import Workload, plan
from pdserve.cli.bench.plot import plot_latencies, require_matplotlib
from pdserve.cli.bench.report import details, figures, table
from pdserve.cli.bench.run import run_workload
from pdserve.cli.bench.server import Server
from pdserve.cli.bench.vocabulary import find_vocabulary
from pdserve.cli.bench.workload import BenchResult, RequestRecord, Target


def main(argv: Sequence[str]) -> int:
    """Runs the workload at each rate. Returns exit code 1 when all requests failed. Raises `PdserveError`."""
    config = load(ServeConfig, "bench serve", argv, description=__doc__)
    if config.plot is not None:
        require_matplotlib()
    server = Server(config.server_url, config.headers)
    target = Target(
        base_url=config.server_url,
        model=server.model(config.model),
        endpoint=config.endpoint,
        fields=config.request_fields,
        headers=config.headers,
    )
    vocabulary = find_vocabulary(server, target.model, tokenizer_dir=config.tokenizer, text_only=target.is_chat)
    if vocabulary.notice and config.dataset_name != SHAREGPT:
        _note(vocabulary.notice)
    environment = {"client": describe_client(datetime.now(UTC)), "server_version": server.version()}
    runs, documents = [], []
    for run, rate in enumerate(config.request_rate):
        workload = plan(config, vocabulary, rate=rate, run=run)
        if workload.note and not run:
            _note(workload.note)
        result = measure(target, workload, config.max_concurrency)
        metrics = summarize(result, percentiles=config.metric_percentiles, goodput_ms=config.goodput)
        _show(config, metrics, result, rate)
        runs.append(metrics)
        documents.append(_document(config, target, rate, metrics, result) | environment)
    if config.save_result:
        _note(f"Result written to {_save(config, target, documents)}")
    if config.plot is not None:
        plot_latencies(
            Path(config.plot), config.request_rate, runs, latencies=config.percentile_metrics, title=target.model
        )
        _note(f"Picture written to {config.plot}")
    return 0 if any(metrics.completed for metrics in runs) else 1


def measure(target: Target, workload: Workload, max_concurrency: int | None) -> BenchResult:
    """Sends the warm-ups, then the workload. Raises `PdserveError` when a warm-up fails."""
    with _progress("warm-up", len(workload.warmups)) as count:
        at_once = [0.0] * len(workload.warmups)
        warm = asyncio.run(run_workload(target, workload.warmups, at_once, max_concurrency=1, on_done=count))
    for failure in warm.failures:
        raise PdserveError(f"A warm-up request failed: {failure.reason}: {failure.message}")
    with _progress("requests", len(workload.requests)) as count:
        return asyncio.run(
            run_workload(target, workload.requests, workload.arrivals_s, max_concurrency=max_concurrency, on_done=count)
        )


@contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[RequestRecord], None]]:
    """Shows a progress bar on the terminal; yields the function that advances it."""
    console = Console(stderr=True)
    columns = (
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[failed]}"),
    )
    with Progress(*columns, console=console, disable=not (total and console.is_terminal)) as progress:
        task = progress.add_task(what, total=total, failed="")
        failed = 0

        def count(record: RequestRecord) -> None:
            nonlocal failed
            failed += record.failure is not None
            progress.update(task, advance=1, failed=f"{failed} failed" if failed else "")

        yield count


def _show(config: ServeConfig, metrics: Metrics, result: BenchResult, rate: float) -> None:
    shown_rate = None if math.isinf(rate) else rate
    print(
        table(
            metrics,
            latencies=config.percentile_metrics,
            request_rate=shown_rate,
            max_concurrency=config.max_concurrency,
        )
    )
    for failure in {failure.reason: failure for failure in result.failures}.values():
        _note(f"{failure.reason}: for example {failure.message}")
    if not all(record.is_counted_by_server for record in result.completed):
        _note("The server reports no usage: each chunk is counted as one output token.")


def _note(text: str) -> None:
    """Prints a line that is not part of the result."""
    print(text, file=sys.stderr, flush=True)


def _document(
    config: ServeConfig, target: Target, rate: float, metrics: Metrics, result: BenchResult
) -> dict[str, object]:
    """A run as JSON: settings and results. Headers may contain API keys and are left out."""
    flags = dataclasses.asdict(config)
    del flags["header"], flags["api_key"]
    flags["request_rate"] = [_json_rate(each) for each in config.request_rate]
    return {
        "endpoint_type": "openai-chat" if target.is_chat else "openai",
        "model_id": target.model,
        "dataset_name": config.dataset_name,
        "num_prompts": len(result.records),
        "request_rate": _json_rate(rate),
        "burstiness": config.burstiness,
        "max_concurrency": config.max_concurrency,
        "seed": config.seed,
        **figures(metrics),
        **(details(result) if config.save_detailed else {}),
        "flags": flags,
    }


def _json_rate(rate: float) -> float | str:
    return "inf" if math.isinf(rate) else rate


def _save(config: ServeConfig, target: Target, runs: Sequence[dict[str, object]]) -> Path:
    """Writes a single run as it is, several as `runs`. Raises `SetupError` when the file cannot be written."""
    rate = "sweep" if len(runs) > 1 else f"{config.request_rate[0]:g}qps"
    model = target.model.rsplit("/", 1)[-1]
    name = config.result_filename or f"openai-{rate}-{model}-{datetime.now(UTC):%Y%m%d-%H%M%S}.json"
    path = Path(config.result_dir) / name
    content = runs[0] if len(runs) == 1 else {"runs": list(runs)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise SetupError(f"Cannot write {path}: {error.strerror}.") from error
    return path
