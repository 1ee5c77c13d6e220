"""`python -m benchmarks.pairs BEFORE_URL AFTER_URL`: whether a change costs anything, from two clusters in turns.

Start both clusters on one machine, of two checkouts with the same flags. Each pair has one run on each, in an order
that alternates, with the same requests: one at a time for TTFT and TPOT, and 16 at a time for the output. What is shown
is the median of the ratios after / before with its 95 % interval. A cluster without requests costs nothing.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.environment import describe, heading
from benchmarks.result_files import write_results


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Requests of one run, and the figures that it is for."""

    concurrency: int
    requests: int
    figures: tuple[str, ...]


LOADS = (
    Load(concurrency=1, requests=6, figures=("median_ttft_ms", "median_tpot_ms")),
    Load(concurrency=16, requests=48, figures=("output_throughput",)),
)


def run(url: str, load: Load, seed: int, output_len: int) -> dict[str, float]:
    """The figures of one run: prompts of 256 tokens, at temperature 0. Raises if a request failed."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "pdserve.cli", "bench", "serve", "--base-url", url, "--ignore-eos"]
        command += ["--random-input-len", "256", "--random-output-len", str(output_len), "--seed", str(seed)]
        command += ["--num-prompts", str(load.requests), "--max-concurrency", str(load.concurrency)]
        command += ["--save-result", "--result-dir", directory, "--result-filename", "result.json"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        result = json.loads((Path(directory) / "result.json").read_text(encoding="utf-8"))
    if result["completed"] != load.requests:
        raise SystemExit(f"{load.requests - result['completed']} requests failed at {url}.")
    return {name: float(result[name]) for name in load.figures}


def median_interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """The median of at least 8 ratios, and the ends of its 95 % interval, whatever their distribution."""
    ranked, count = sorted(ratios), len(ratios)
    below = max(0, math.floor((count - 1.96 * math.sqrt(count)) / 2) - 1)
    return statistics.median(ranked), ranked[below], ranked[count - 1 - below]


def pairs(
    urls: tuple[str, str], load: Load, count: int, output_len: int
) -> Iterator[tuple[dict[str, float], dict[str, float]]]:
    """The figures before and after of each pair."""
    for seed in range(count):
        order = (0, 1) if seed % 2 == 0 else (1, 0)
        found = {index: run(urls[index], load, seed, output_len) for index in order}
        yield found[0], found[1]


def main() -> None:
    """Prints a line for each figure, and writes all samples."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pairs", description=__doc__)
    parser.add_argument("before")
    parser.add_argument("after")
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--load", type=int, choices=range(len(LOADS)), help="one of the two loads; default: both")
    parser.add_argument("--output-len", type=int, default=64, help="tokens of each output; default: 64")
    parser.add_argument("--title", required=True, help="what was changed")
    parser.add_argument("--directory", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    samples: dict[str, list[tuple[float, float]]] = {}
    urls = (arguments.before, arguments.after)
    for load in LOADS if arguments.load is None else (LOADS[arguments.load],):
        for url in urls:
            run(url, load, 10**6, arguments.output_len)  # Not counted.
        for before, after in pairs(urls, load, arguments.pairs, arguments.output_len):
            for name in load.figures:
                samples.setdefault(name, []).append((before[name], after[name]))
    machine = describe()
    about = f"{arguments.pairs} pairs, outputs of {arguments.output_len} tokens"
    lines = [f"# {arguments.title}", "", heading(machine, about), ""]
    lines += ["| figure | before | after | ratio | 95 % |", "| --- | --- | --- | --- | --- |"]
    for name, measured in samples.items():
        ratio, low, high = median_interval([after / before for before, after in measured])
        before, after = (statistics.median(column) for column in zip(*measured, strict=True))
        lines.append(f"| {name} | {before:.2f} | {after:.2f} | {ratio:.4f} | {low:.4f} to {high:.4f} |")
    today = dt.datetime.now(tz=dt.UTC).date()
    raw = {"title": arguments.title, "machine": machine, "samples": samples}
    write_results(arguments.directory, f"pairs-{today}", raw, "\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
