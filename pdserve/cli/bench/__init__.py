"""`pdserve bench`: measures a server's latency and throughput, and the speed of the kernels it computes with."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

#: Help text of each benchmark, by the name of its module.
BENCHMARKS = {
    "serve": "drive any OpenAI-compatible server and report its latencies and throughput",
    "kernels": "measure each op of the C++ kernels against the reference and the machine's limits",
}


def main(argv: Sequence[str]) -> int:
    """Runs the benchmark that `argv` names; returns the exit code. Raises `PdserveError`, shown as one line."""
    if not argv:
        print(_help())
        return 0
    name, *rest = argv
    if name in ("-h", "--help", "help"):
        print(_help())
        sys.exit(0)
    if name not in BENCHMARKS:
        print(f"error: {name!r} is not a benchmark. Benchmarks: {', '.join(BENCHMARKS)}.", file=sys.stderr)
        return 2
    exit_code: int = importlib.import_module(f"pdserve.cli.bench.{name}").main(rest)
    return exit_code


def _help() -> str:
    width = max(map(len, BENCHMARKS))
    return "usage: pdserve bench BENCHMARK [ARGUMENTS]\n\n" + "\n".join(
        f"  {name:<{width}}  {text}" for name, text in BENCHMARKS.items()
    )
