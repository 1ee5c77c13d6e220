"""Time from `kill -9` of a worker until it is ready again, and how long a stream on it pauses.

    python -m benchmarks.restart [--repeats 8] [--out benchmarks/results]

A cluster of `pdserve up` with one worker of each tier has one stream at a time. Its decode worker, or its prefill
worker, is killed in mid-stream. Rounds alternate between workers that are forked and workers that are executed: for
those, the fork server is killed just before. Each worker has served for some seconds when it is killed, as one that is
restarted without a pause.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import openai
import psutil

from benchmarks.environment import describe, heading
from benchmarks.result_files import write_results
from pdserve.cli.status import WorkerStatus
from tests.support.cluster import MODEL, Cluster, running_cluster

OUTPUT_TOKENS = 400
TOKENS_BEFORE = 20
#: From which on a process is restarted at once (`BackoffPolicy.stable_s`), and a little more.
SERVED_S = 5.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One death."""

    tier: str
    start: str
    ready_again_s: float
    #: Between two tokens of the stream; None: the killed worker did not decode it.
    pause_ms: float | None


async def _tokens(client: openai.AsyncOpenAI, times: list[float], started: asyncio.Event) -> None:
    stream = await client.completions.create(
        model=MODEL,
        prompt="Once upon a time",
        max_tokens=OUTPUT_TOKENS,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    async for chunk in stream:
        if chunk.choices and chunk.choices[0].text:
            times.append(time.perf_counter())
            if len(times) == TOKENS_BEFORE:
                started.set()


async def _sample(cluster: Cluster, client: openai.AsyncOpenAI, tier: str, start: str) -> Sample:
    name = f"{tier}-0"
    [before] = cluster.workers(tier)
    times: list[float] = []
    started = asyncio.Event()
    stream = asyncio.create_task(_tokens(client, times, started))
    await started.wait()
    if start == "executed":
        _fork_server(cluster).kill()
    killed_at = time.perf_counter()
    cluster.kill(name)
    await cluster.until_async(lambda: _is_restarted(cluster, before), "restarted", timeout_s=60)
    ready_again_s = time.perf_counter() - killed_at
    await stream
    pause_ms = None
    if tier == "decode":
        after = next(index for index, at in enumerate(times) if at > killed_at)
        # Tokens that were on their way when it died still come: the pause is the longest one from there on.
        pauses = (later - earlier for earlier, later in itertools.pairwise(times[after - 1 :]))
        pause_ms = 1000 * max(pauses)
    await asyncio.sleep(SERVED_S)
    return Sample(tier=tier, start=start, ready_again_s=ready_again_s, pause_ms=pause_ms)


def _is_restarted(cluster: Cluster, before: WorkerStatus) -> bool:
    return any(worker.epoch != before.epoch for worker in cluster.workers(before.tier))


def _fork_server(cluster: Cluster) -> psutil.Process:
    [found] = [
        child
        for child in psutil.Process(cluster.process.pid).children()
        if any("supervisor.forking" in word for word in child.cmdline())
    ]
    return found


async def measured(repeats: int) -> list[Sample]:
    """All samples, in the order in which they were taken."""
    cases = itertools.product(range(repeats), ("decode", "prefill"), ("forked", "executed"))
    with (
        tempfile.TemporaryDirectory() as directory,
        running_cluster(Path(directory), "--kv-cache-memory", "512MiB") as cluster,
    ):
        async with cluster.async_client() as client:
            await asyncio.sleep(SERVED_S)
            return [await _sample(cluster, client, tier, start) for _, tier, start in cases]


def report(samples: Sequence[Sample]) -> str:
    """The table."""
    lines = [
        "| worker | start | ready again, median (max), s | pause of the stream, median (max), ms |",
        "| --- | --- | --- | --- |",
    ]
    for tier in ("decode", "prefill"):
        for start in ("forked", "executed"):
            chosen = [sample for sample in samples if (sample.tier, sample.start) == (tier, start)]
            ready = [sample.ready_again_s for sample in chosen]
            pauses = [sample.pause_ms for sample in chosen if sample.pause_ms is not None]
            pause = f"{statistics.median(pauses):.0f} ({max(pauses):.0f})" if pauses else "-"
            lines.append(f"| {tier} | {start} | {statistics.median(ready):.2f} ({max(ready):.2f}) | {pause} |")
    return "\n".join(lines)


def main() -> None:
    """Measures, prints the table, and writes it with the raw results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    samples = asyncio.run(measured(arguments.repeats))
    table = report(samples)
    print(table)
    if arguments.out is not None:
        environment = describe()
        raw = {"environment": environment, "repeats": arguments.repeats, "samples": [asdict(each) for each in samples]}
        write_results(arguments.out, "restart", raw, f"# Restarts\n\n{heading(environment, 'Times')}{table}\n")


if __name__ == "__main__":
    main()
