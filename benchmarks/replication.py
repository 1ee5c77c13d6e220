"""What copies of KV blocks at another decode worker save when a worker is lost, and what they cost.

    python -m benchmarks.replication [--repeats 20] [--rounds 6] [--out benchmarks/results]

Two clusters of `pdserve up` with two decode workers run at the same time: one makes copies, the other does not.

Recovery: a stream runs on one of the clusters alone, in turns. The worker that decodes it is killed (SIGKILL) behind
two thirds of its tokens. The pause is the longest interval between two tokens from there on, less the stream's median
interval; it includes the detection of the loss. The other decode worker is idle.

Cost: streams run on each cluster in turns, and all of its processes' processor time is divided by the tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

import openai

from benchmarks.environment import describe, heading
from benchmarks.pairs import median_interval
from benchmarks.result_files import write_results
from tests.support.cluster import MODEL, Cluster, running_cluster

PROMPTS, OUTPUT_TOKENS = (16, 500), 420
#: Tokens before the worker is killed: the last ones are not yet copied, for a random part of an interval.
KILLED_BEHIND = (240, 320)
STREAMS, STREAM_TOKENS = 4, 300
SETTLE_S = 6.0
MODES = {"with copies": "500", "without": "0"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """One death of a decode worker."""

    mode: str
    prompt_tokens: int
    pause_ms: float
    interval_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """One round of streams."""

    mode: str
    processor_ms_per_token: float
    tokens_per_s: float


@dataclass(slots=True)
class _Stream:
    """What a client sees of a stream."""

    #: Event number at which `reached` is set.
    wanted: int = 0
    reached: asyncio.Event = field(default_factory=asyncio.Event)
    request_id: str = ""
    times: list[float] = field(default_factory=list)


async def _run(client: openai.AsyncOpenAI, rng: random.Random, prompt: int, tokens: int, seen: _Stream) -> None:
    stream = await client.completions.create(
        model=MODEL,
        prompt=[rng.randrange(100, 10_000) for _ in range(prompt)],
        max_tokens=tokens,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    async for chunk in stream:
        seen.times.append(time.perf_counter())
        seen.request_id = chunk.id
        if len(seen.times) == seen.wanted:
            seen.reached.set()


def _decode_worker(cluster: Cluster, request_id: str) -> str:
    with urllib.request.urlopen(f"{cluster.base_url}/v1/requests/{request_id}/trace") as answer:
        decisions = json.load(answer)["decisions"]
    return str([each["worker"] for each in decisions if each["tier"] == "decode"][-1])


async def _recovery(cluster: Cluster, client: openai.AsyncOpenAI, mode: str, prompt: int, seed: int) -> Recovery:
    rng = random.Random(seed)
    seen = _Stream(rng.randrange(*KILLED_BEHIND))
    running = asyncio.create_task(_run(client, rng, prompt, OUTPUT_TOKENS, seen))
    await seen.reached.wait()
    worker = await asyncio.to_thread(_decode_worker, cluster, seen.request_id)
    killed_at = time.perf_counter()
    cluster.kill(worker)
    await running
    intervals = [later - earlier for earlier, later in itertools.pairwise(seen.times)]
    first = next(index for index, at in enumerate(seen.times) if at > killed_at)
    typical = statistics.median(intervals)
    pause = max(intervals[max(0, first - 1) :]) - typical
    await cluster.until_async(lambda: len(cluster.workers("decode")) == 2, "restarted", timeout_s=60)
    await asyncio.sleep(SETTLE_S)
    return Recovery(mode=mode, prompt_tokens=prompt, pause_ms=1000 * pause, interval_ms=1000 * typical)


def _processor_s(cluster: Cluster) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in cluster.processes().values())


async def _cost(cluster: Cluster, client: openai.AsyncOpenAI, mode: str, seed: int) -> Cost:
    before, started_at = _processor_s(cluster), time.perf_counter()
    streams = [
        _run(client, random.Random(seed + index), PROMPTS[0], STREAM_TOKENS, _Stream()) for index in range(STREAMS)
    ]
    await asyncio.gather(*streams)
    tokens = STREAMS * STREAM_TOKENS
    used, took = _processor_s(cluster) - before, time.perf_counter() - started_at
    return Cost(mode=mode, processor_ms_per_token=1000 * used / tokens, tokens_per_s=tokens / took)


async def measured(repeats: int, rounds: int) -> tuple[list[Recovery], list[Cost]]:
    """All samples, in the order in which they were taken."""
    recoveries, costs = list[Recovery](), list[Cost]()
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        clusters = {
            mode: stack.enter_context(
                running_cluster(
                    Path(directory) / interval,
                    "--decode",
                    "2",
                    "--kv-cache-memory",
                    "512MiB",
                    PDSERVE_DECODE__REPLICATION_INTERVAL_MS=interval,
                )
            )
            for mode, interval in MODES.items()
        }
        clients = {mode: cluster.async_client() for mode, cluster in clusters.items()}
        await asyncio.sleep(SETTLE_S)
        for turn in range(-1, rounds):
            for mode in sorted(MODES, reverse=bool(turn % 2)):
                cost = await _cost(clusters[mode], clients[mode], mode, 1000 * turn)
                costs += [cost] if turn >= 0 else []  # The first turn warms up.
        for turn, prompt, mode in itertools.product(range(repeats), PROMPTS, MODES):
            recoveries.append(await _recovery(clusters[mode], clients[mode], mode, prompt, turn))
        for client in clients.values():
            await client.close()
    return recoveries, costs


def report(recoveries: Sequence[Recovery], costs: Sequence[Cost]) -> str:
    """Two Markdown tables."""
    lines = [
        "| pause behind a kill, ms | prompt | samples | p50 | p90 | max |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for mode, prompt in itertools.product(MODES, PROMPTS):
        pauses = [each.pause_ms for each in recoveries if (each.mode, each.prompt_tokens) == (mode, prompt)]
        if len(pauses) > 1:
            ninety = statistics.quantiles(pauses, n=10, method="inclusive")[-1]
            lines.append(
                f"| {mode} | {prompt} | {len(pauses)} | {statistics.median(pauses):.0f} | {ninety:.0f} | "
                f"{max(pauses):.0f} |"
            )
    lines += ["", "| cost, median | ms of processor time per token | tokens/s |", "| --- | --- | --- |"]
    chosen = {mode: [each for each in costs if each.mode == mode] for mode in MODES}
    for mode, rounds in chosen.items():
        if rounds:
            lines.append(
                f"| {mode} | {statistics.median(each.processor_ms_per_token for each in rounds):.3f} | "
                f"{statistics.median(each.tokens_per_s for each in rounds):.1f} |"
            )
    pairs = [*zip(*chosen.values(), strict=True)]
    if len(pairs) >= 8:
        processor = [ours.processor_ms_per_token / other.processor_ms_per_token for ours, other in pairs]
        speed = [ours.tokens_per_s / other.tokens_per_s for ours, other in pairs]
        found = map(median_interval, (processor, speed))
        shown = " | ".join(f"{ratio:.4f} ({low:.4f} to {high:.4f})" for ratio, low, high in found)
        lines.append(f"| median ratio of {len(pairs)} pairs, and its 95 % interval | {shown} |")
    return "\n".join(lines)


def main() -> None:
    """Measures, prints the tables, and writes them with the raw results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    recoveries, costs = asyncio.run(measured(arguments.repeats, arguments.rounds))
    tables = report(recoveries, costs)
    print(tables)
    if arguments.out is not None:
        environment = describe()
        raw = {
            "environment": environment,
            "recoveries": [asdict(each) for each in recoveries],
            "costs": [asdict(each) for each in costs],
        }
        write_results(arguments.out, "replication", raw, f"# Copies\n\n{heading(environment, 'Times')}{tables}\n")


if __name__ == "__main__":
    main()
