"""`pdserve run-batch`: sends the requests of a file to a running cluster, and writes their results to another one."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pdserve.base.config import load, option
from pdserve.cli.router_client import DEFAULT_BASE_URL, normal_base_url
from pdserve.cli.run_batch.input_file import check_input, read_lines
from pdserve.cli.run_batch.output_file import OutputFile
from pdserve.cli.run_batch.run import Summary, Target, run_batch

#: As `vllm run-batch` has them.
_SHORT = {"-i": "--input-file", "-o": "--output-file"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunBatchConfig:
    """Settings of `pdserve run-batch`."""

    input_file: str = option(help="requests, one JSON object per line, as in OpenAI's Batch API", metavar="FILE")
    output_file: str = option(help="file for the results; requests whose results it has are left out", metavar="FILE")
    base_url: str = option(DEFAULT_BASE_URL, help="address of the router", metavar="URL")
    api_key: str | None = option(None, help="API key; default: the variable PDSERVE_API_KEY", metavar="KEY")
    max_concurrency: int = option(32, help="number of requests at a time", minimum=1)
    overload_timeout_s: float = option(
        600.0, help="seconds that a request may wait for an overloaded cluster", minimum=0
    )


def main(argv: Sequence[str]) -> int:
    """Runs what is left of the batch; 0 when every result is a success. Raises `PdserveError`."""
    config = load(RunBatchConfig, "run-batch", [_SHORT.get(word, word) for word in argv], description=__doc__)
    path = Path(config.input_file)
    custom_ids = check_input(path)
    target = Target(
        base_url=normal_base_url(config.base_url),
        api_key=config.api_key,
        max_concurrency=config.max_concurrency,
        overload_timeout_s=config.overload_timeout_s,
    )
    with closing(OutputFile(Path(config.output_file))) as output:
        left = len(custom_ids - output.custom_ids)
        lines = (line for line in read_lines(path) if line.custom_id not in output.custom_ids)
        with _progress(left) as on_done:
            summary = asyncio.run(run_batch(target, lines, output, on_done))
    _report(config, summary, before=len(custom_ids) - left)
    return 0 if not summary.failed else 1


@contextmanager
def _progress(total: int) -> Iterator[Callable[[], None]]:
    console = Console(stderr=True)
    columns = (TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not (total and console.is_terminal)) as progress:
        task = progress.add_task("requests", total=total)
        yield lambda: progress.update(task, advance=1)


def _report(config: RunBatchConfig, summary: Summary, *, before: int) -> None:
    text = f"{summary.succeeded} requests succeeded, {summary.failed} failed"
    if before:
        text += f"; {before} were done before"
    print(f"{text}. Results: {config.output_file}", file=sys.stderr)
