"""How long requests pause when they move between decode workers under load, beside their own next intervals.

    python -m benchmarks.migration [--drains 20] [--streams 8] [--out benchmarks/results]

A cluster of `pdserve up` with two decode workers has a fixed number of streams. One decode worker and the other are
drained in turn with `pdserve drain`, and taken back before the next one. No process is started or ended meanwhile. Each
pause is paired with the median interval of the same stream just behind it, on the worker that has taken over. So is
every interval of every stream, as the clients see it: prompts of new streams and other programs make some longer.
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import itertools
import json
import random
import statistics
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai

from benchmarks.environment import describe, heading
from benchmarks.result_files import write_results
from pdserve.cli.__main__ import main as pdserve
from tests.support.cluster import MODEL, Cluster, running_cluster

PROMPT_TOKENS, OUTPUT_TOKENS = 100, 300
#: Streams settle before the first drain, and run on both workers again before the next one.
SETTLE_S = 3.0
#: Intervals behind a pause that it is compared with.
NUM_NEXT = 20


@dataclass(slots=True, kw_only=True)
class Samples:
    """What clients and decision records have shown, in seconds."""

    #: Times between the tokens around each switch, as decision records have them.
    pauses: list[float] = field(default_factory=list)
    #: The median of the stream's next intervals.
    steps: list[float] = field(default_factory=list)
    #: What any interval of a stream is longer than the median of its next ones, moves or not.
    excesses: list[float] = field(default_factory=list)
    #: Moves by outcome.
    outcomes: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True, kw_only=True)
class Streamed:
    """One stream, and when its events came, in seconds since 1970."""

    request_id: str
    times: list[float]


async def _stream(client: openai.AsyncOpenAI, rng: random.Random) -> Streamed:
    """Runs one stream."""
    stream = await client.completions.create(
        model=MODEL,
        prompt=[rng.randrange(100, 10_000) for _ in range(PROMPT_TOKENS)],
        max_tokens=OUTPUT_TOKENS,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    times, request_id = list[float](), ""
    async for chunk in stream:
        times.append(time.time())
        request_id = chunk.id
    return Streamed(request_id=request_id, times=times)


async def _streams(cluster: Cluster, client: openai.AsyncOpenAI, seed: int, over: asyncio.Event, to: Samples) -> None:
    """One stream after the other until `over` is set."""
    rng = random.Random(seed)
    while not over.is_set():
        streamed = await _stream(client, rng)
        url = f"{cluster.base_url}/v1/requests/{streamed.request_id}/trace"
        _add(await asyncio.to_thread(_fetched, url), streamed.times, to)
        intervals = [later - earlier for earlier, later in itertools.pairwise(streamed.times)]
        for index in range(len(intervals) - NUM_NEXT):
            to.excesses.append(intervals[index] - statistics.median(intervals[index + 1 : index + 1 + NUM_NEXT]))


def _fetched(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(url) as response:
        return json.load(response)  # type: ignore[no-any-return]


def _add(record: dict[str, Any], times: list[float], to: Samples) -> None:
    """Adds the moves of a request."""
    for move in record["migrations"]:
        to.outcomes[move["outcome"]] += 1
        if move["pause_s"] is None:
            continue
        first = bisect.bisect(times, record["accepted_at"] + move["ended_at"] + move["pause_s"])
        if len(times) < first + NUM_NEXT:
            to.outcomes["too late to compare"] += 1
            continue
        behind = times[first : first + NUM_NEXT]
        to.pauses.append(move["pause_s"])
        to.steps.append(statistics.median(later - earlier for earlier, later in itertools.pairwise(behind)))


async def _drain_in_turn(cluster: Cluster, drains: int) -> None:
    for name in itertools.islice(itertools.cycle(("decode-0", "decode-1")), drains):
        await asyncio.sleep(SETTLE_S)
        for flags in ((), ("--undo",)):
            if await asyncio.to_thread(pdserve, ["drain", name, "--base-url", cluster.base_url, *flags]):
                raise RuntimeError(f"pdserve drain {name} has failed. Its message is above.")


async def measured(drains: int, streams: int) -> Samples:
    """All samples."""
    samples, over = Samples(), asyncio.Event()
    flags = ("--decode", "2", "--kv-cache-memory", "512MiB")
    with tempfile.TemporaryDirectory() as directory, running_cluster(Path(directory), *flags) as cluster:
        async with cluster.async_client() as client, asyncio.TaskGroup() as tasks:
            for seed in range(streams):
                tasks.create_task(_streams(cluster, client, seed, over, samples))
            await _drain_in_turn(cluster, drains)
            over.set()
    return samples


def report(samples: Samples) -> str:
    """A Markdown table in milliseconds."""
    rows = [
        f"| {name} | {len(values)} | "
        + " | ".join(f"{1000 * _quantile(values, share):.1f}" for share in (50, 90, 99))
        + " |"
        for name, values in (
            ("pause of a move", samples.pauses),
            ("the same stream's next intervals", samples.steps),
            ("difference", [pause - step for pause, step in zip(samples.pauses, samples.steps, strict=True)]),
            ("the same of any interval", samples.excesses),
        )
    ]
    outcomes = ", ".join(f"{count} {name}" for name, count in sorted(samples.outcomes.items())) or "none"
    table = ["| | samples | p50 ms | p90 ms | p99 ms |", "| --- | --- | --- | --- | --- |", *rows]
    return "\n".join([*table, "", f"Moves: {outcomes}."])


def _quantile(values: Sequence[float], percent: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def main() -> None:
    """Measures, prints the table, and writes it with the raw results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drains", type=int, default=20)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    samples = asyncio.run(measured(arguments.drains, arguments.streams))
    table = report(samples)
    print(table)
    if arguments.out is not None:
        environment = describe()
        raw = {"environment": environment, "drains": arguments.drains, "streams": arguments.streams}
        raw |= {"pauses": samples.pauses, "steps": samples.steps, "outcomes": dict(samples.outcomes)}
        write_results(arguments.out, "migration", raw, f"# Moves\n\n{heading(environment, 'Times')}{table}\n")


if __name__ == "__main__":
    main()
