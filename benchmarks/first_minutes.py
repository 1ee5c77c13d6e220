"""Requests from the moment of "Ready" on, compared with later ones, and with another version of pdserve.

    python -m benchmarks.first_minutes [--against DIRECTORY] [--rounds 3] [--requests 110] [--out benchmarks/results]
        [-- FLAGS OF PDSERVE UP]

Each round starts a fresh cluster of each version in turn. Requests follow each other without a pause: 256 random
tokens in, 32 out, greedy, seeded. `--against` names another working tree with its own `.venv`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from benchmarks.environment import describe, heading
from benchmarks.result_files import write_results
from pdserve.cli.bench.client import open_session, send
from pdserve.cli.bench.workload import BenchRequest, Target
from tests.support.cluster import MODEL, free_port

PROMPT_TOKENS, OUTPUT_TOKENS = 256, 32
_VOCABULARY = 40_000
#: The hundredth request and its neighbours, the last ones: one alone is noisy on a shared machine.
_LATER = slice(-20, None)
#: Seconds after "Ready" that count as the first ones.
_FIRST_S = 8.0
_READY = re.compile(r"^Ready after ([\d.]+) s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One request; `at_s` is relative to "Ready"."""

    at_s: float
    ttft_s: float
    tpot_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One cluster: its start, and its requests in order."""

    ready_s: float
    #: Processor time of the cluster's processes until it was ready, and until the last answer.
    ready_cpu_s: float
    cpu_s: float
    samples: tuple[Sample, ...]

    def later(self, field: str) -> float:
        """Median of the requests around the hundredth."""
        return statistics.median(getattr(sample, field) for sample in self.samples[_LATER])

    def first_seconds(self, field: str) -> float:
        """Median of the requests sent in the first seconds."""
        return statistics.median(getattr(sample, field) for sample in self.samples if sample.at_s < _FIRST_S)


@contextmanager
def _started(tree: Path, flags: Sequence[str]) -> Iterator[tuple[str, float, psutil.Process]]:
    """A ready cluster of the version in `tree`: its address, seconds to "Ready", its supervisor."""
    port = free_port()
    with tempfile.TemporaryDirectory() as directory:
        command = [str(tree / ".venv/bin/python"), "-m", "pdserve.cli", "up", MODEL, "--port", str(port)]
        process = subprocess.Popen(
            [*command, "--log-dir", directory, *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            cwd=tree,
        )
        assert process.stdout is not None
        try:
            seen: list[str] = []
            for line in process.stdout:
                seen.append(line)
                if found := _READY.match(line):
                    yield f"http://127.0.0.1:{port}", float(found[1]), psutil.Process(process.pid)
                    break
            else:
                raise SystemExit("pdserve up is not ready:\n" + "".join(seen))
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.communicate(timeout=60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()


def _cpu_s(supervisor: psutil.Process) -> float:
    times = [process.cpu_times() for process in (supervisor, *supervisor.children(recursive=True))]
    return sum(each.user + each.system for each in times)


async def _requests(base_url: str, count: int, seed: int) -> list[Sample]:
    rng = random.Random(seed)
    prompts = [tuple(rng.randrange(100, _VOCABULARY) for _ in range(PROMPT_TOKENS)) for _ in range(count)]
    target = Target(base_url=base_url, model=MODEL, fields={"temperature": 0, "ignore_eos": True})
    samples = []
    async with open_session(target) as session:
        started_at = time.perf_counter()
        for prompt in prompts:
            request = BenchRequest(prompt=prompt, max_tokens=OUTPUT_TOKENS)
            record = await send(session, target, request, run_started_at=started_at)
            if record.failure is not None:
                raise SystemExit(f"a request failed: {record.failure}")
            assert record.tpot_s is not None
            samples.append(Sample(at_s=record.start_s, ttft_s=record.ttft_s, tpot_s=record.tpot_s))
    return samples


async def _warm_client() -> None:
    """The first use of the client's own code must not count as the cluster's first request."""
    target = Target(base_url=f"http://127.0.0.1:{free_port()}", model=MODEL)
    async with open_session(target) as session:
        await send(session, target, BenchRequest(prompt=(1,), max_tokens=1), run_started_at=0.0)


def run(tree: Path, flags: Sequence[str], *, count: int, seed: int) -> Run:
    """Starts a cluster, and sends requests from the moment it is ready."""
    asyncio.run(_warm_client())
    with _started(tree, flags) as (base_url, ready_s, supervisor):
        ready_cpu_s = _cpu_s(supervisor)
        samples = asyncio.run(_requests(base_url, count, seed))
        return Run(ready_s=ready_s, ready_cpu_s=ready_cpu_s, cpu_s=_cpu_s(supervisor), samples=tuple(samples))


def rows(runs: Sequence[Run]) -> dict[str, str]:
    """Medians over rounds: what is measured -> value."""

    def median(values: Sequence[float]) -> float:
        return statistics.median(values)

    found = {
        "Ready": f"{median([each.ready_s for each in runs]):.1f} s",
        "processor time until Ready": f"{median([each.ready_cpu_s for each in runs]):.1f} s",
    }
    for field, name in (("ttft_s", "TTFT"), ("tpot_s", "TPOT")):
        first = [getattr(each.samples[0], field) for each in runs]
        seconds = [each.first_seconds(field) for each in runs]
        later = [each.later(field) for each in runs]
        found[f"{name}: first request"] = _value(first, later)
        found[f"{name}: first {_FIRST_S:g} s, median"] = _value(seconds, later)
        found[f"{name}: around the hundredth, median"] = f"{1000 * median(later):.1f} ms"
    return found


def _value(values: Sequence[float], later: Sequence[float]) -> str:
    ratio = statistics.median(value / base for value, base in zip(values, later, strict=True))
    return f"{1000 * statistics.median(values):.1f} ms ({ratio:.2f}x)"


def table(runs: dict[str, list[Run]]) -> str:
    """One column per version, as Markdown."""
    columns = {name: rows(each) for name, each in runs.items()}
    lines = ["| | " + " | ".join(columns) + " |", "| --- |" + " ---: |" * len(columns)]
    lines += [
        f"| {key} | " + " | ".join(column[key] for column in columns.values()) + " |"
        for key in next(iter(columns.values()))
    ]
    return "\n".join(lines)


def _commit(tree: Path) -> str:
    command = ["git", "-C", str(tree), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="working tree of another version, with its .venv")
    parser.add_argument("--rounds", type=int, default=3, help="clusters of each version")
    parser.add_argument("--requests", type=int, default=110, help="requests per cluster")
    parser.add_argument("--seed", type=int, default=1, help="seed of the prompts")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="directory of the result files")
    parser.add_argument("flags", nargs="*", help="flags of pdserve up, after --")
    arguments = parser.parse_args()
    trees = {"now": Path(sys.prefix).parent}
    if arguments.against is not None:
        trees = {"before": arguments.against.absolute(), **trees}
    runs: dict[str, list[Run]] = {name: [] for name in trees}
    for number in range(arguments.rounds):
        for name, tree in trees.items():
            runs[name].append(run(tree, arguments.flags, count=arguments.requests, seed=arguments.seed + number))
            print(f"round {number + 1}, {name}: {rows(runs[name][-1:])}", flush=True)
    environment = describe()
    page = (
        f"# The first minutes, {environment['date']}\n\n"
        + heading(environment, f"{MODEL}, {PROMPT_TOKENS} tokens in, {OUTPUT_TOKENS} out, one at a time from Ready on,")
        + f"Medians of {arguments.rounds} clusters; in brackets, the ratio to the requests around the hundredth.\n\n"
        + table(runs)
        + "\n"
    )
    raw = {
        "environment": environment,
        "commits": {name: _commit(tree) for name, tree in trees.items()},
        "workload": {"seed": arguments.seed, "requests": arguments.requests, "flags": arguments.flags},
        "runs": {name: [asdict(each) for each in found] for name, found in runs.items()},
    }
    print(table(runs))
    write_results(arguments.out, f"first-minutes-{environment['date']}", raw, page)


if __name__ == "__main__":
    main()
