"""Output of a stack of containers compared with `pdserve up` on the same cores.

    docker compose -f compose/compose.yaml up -d
    python -m benchmarks.containers --stack http://127.0.0.1:8000 [--rounds 6] [--requests 24] [--concurrency 1 4]
        [--out benchmarks/results] [-- FLAGS OF PDSERVE UP]

Both run at the same time, and get windows of equal requests in turn, in an order that changes from round to round: 256
random tokens in, 64 out, greedy, seeded. The one that waits computes nothing. Give both the same memory: the flag
`--kv-cache-memory` and the variable `PDSERVE_KV_CACHE_MEMORY`.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from benchmarks.environment import describe, heading
from benchmarks.result_files import write_results
from pdserve.base.api_key import bearer
from pdserve.cli.bench.run import run_workload
from pdserve.cli.bench.workload import BenchRequest, Target
from tests.support.cluster import MODEL, running_cluster

PROMPT_TOKENS, OUTPUT_TOKENS = 256, 64
_VOCABULARY = 40_000
STACK, UP = "containers", "pdserve up"
#: A machine rests when its processors have been idle for this share of a second; memory is populated then no more.
_IDLE_PERCENT, _REST_TIMEOUT_S = 5.0, 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Equal requests to one of both."""

    system: str
    concurrency: int
    round: int
    output_tokens_per_s: float
    ttft_s: float
    tpot_s: float


def _wait_for_rest() -> None:
    deadline = time.monotonic() + _REST_TIMEOUT_S
    while psutil.cpu_percent(interval=1.0) > _IDLE_PERCENT:
        if time.monotonic() > deadline:
            raise SystemExit("The machine does not rest: other programs compute. Stop them first.")


def run_window(system: str, base_url: str, number: int, *, requests: int, concurrency: int) -> Window:
    """Sends the requests of a window. Both systems get the same ones in a round."""
    rng = random.Random(f"{number} {concurrency}")
    workload = [
        BenchRequest(
            prompt=tuple(rng.randrange(100, _VOCABULARY) for _ in range(PROMPT_TOKENS)), max_tokens=OUTPUT_TOKENS
        )
        for _ in range(requests)
    ]
    fields = {"temperature": 0, "ignore_eos": True}
    target = Target(base_url=base_url, model=MODEL, fields=fields, headers=bearer(None))
    result = asyncio.run(run_workload(target, workload, [0.0] * requests, max_concurrency=concurrency))
    if result.failures:
        raise SystemExit(f"A request to {system} failed: {result.failures[0]}")
    tpot_s = [record.tpot_s for record in result.records if record.tpot_s is not None]
    return Window(
        system=system,
        concurrency=concurrency,
        round=number,
        output_tokens_per_s=requests * OUTPUT_TOKENS / result.duration_s,
        ttft_s=statistics.median(record.ttft_s for record in result.records),
        tpot_s=statistics.median(tpot_s),
    )


def ratios(windows: Sequence[Window], field: str, concurrency: int) -> list[float]:
    """Containers relative to `pdserve up`, round by round."""
    found = {(each.system, each.round): getattr(each, field) for each in windows if each.concurrency == concurrency}
    rounds = sorted({number for _, number in found})
    return [found[STACK, number] / found[UP, number] for number in rounds]


def table(windows: Sequence[Window]) -> str:
    """One row per concurrency and measure, as Markdown: medians, and the median of the rounds' ratios."""
    lines = [f"| streams | | {UP} | {STACK} | ratio (of each round) |", "| ---: | --- | ---: | ---: | --- |"]
    for concurrency in sorted({each.concurrency for each in windows}):
        for field, name, scale in (
            ("output_tokens_per_s", "output tokens/s", 1),
            ("ttft_s", "TTFT, ms", 1000),
            ("tpot_s", "TPOT, ms", 1000),
        ):
            values = {
                system: statistics.median(
                    scale * getattr(each, field)
                    for each in windows
                    if (each.system, each.concurrency) == (system, concurrency)
                )
                for system in (UP, STACK)
            }
            each_round = ratios(windows, field, concurrency)
            lines.append(
                f"| {concurrency} | {name} | {values[UP]:.1f} | {values[STACK]:.1f} | "
                f"{statistics.median(each_round):.2f} ({', '.join(f'{ratio:.2f}' for ratio in each_round)}) |"
            )
    return "\n".join(lines)


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stack", required=True, help="address of the stack's router")
    parser.add_argument("--rounds", type=int, default=6, help="windows of each")
    parser.add_argument("--requests", type=int, default=24, help="requests per window")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4], help="streams at a time")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="directory of the result files")
    parser.add_argument("flags", nargs="*", help="flags of pdserve up, after --")
    arguments = parser.parse_args()
    windows: list[Window] = []
    with tempfile.TemporaryDirectory() as directory, running_cluster(Path(directory), *arguments.flags) as cluster:
        urls = {UP: cluster.base_url, STACK: arguments.stack}
        for number in range(-1, arguments.rounds):
            order = (UP, STACK) if number % 2 else (STACK, UP)
            for concurrency in arguments.concurrency:
                for system in order:
                    _wait_for_rest()
                    requests = math.ceil(arguments.requests / 4) if number < 0 else arguments.requests
                    window = run_window(system, urls[system], number, requests=requests, concurrency=concurrency)
                    if number >= 0:  # The round before is for warming up.
                        windows.append(window)
                        print(window, flush=True)
    print(table(windows))
    environment = describe()
    write_results(
        arguments.out,
        f"containers-{environment['date']}",
        {"environment": environment, "windows": [asdict(each) for each in windows]},
        f"# Containers compared with pdserve up\n\n{heading(environment, 'Medians')}{table(windows)}\n",
    )


if __name__ == "__main__":
    main()
