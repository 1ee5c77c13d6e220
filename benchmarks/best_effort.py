"""What requests of a batch cost the streams that run at the same time, and what the batch gets done.

    python -m benchmarks.best_effort [--rounds 8] [--streams 1 4] [--itl-budget-ms 30] [--out benchmarks/results]

A cluster of `pdserve up` has streams with and without a batch, in either order. Each round takes the same prompts for
both kinds. The batch has more requests than a round can end, so that it always has more to compute. It is cancelled
behind the round. Tokens of the batch are those of all requests that the router has counted meanwhile, less those of the
streams.
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
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import openai

from benchmarks.environment import describe, heading
from benchmarks.result_files import write_results
from tests.support.cluster import MODEL, Cluster, running_cluster

PROMPT_TOKENS, OUTPUT_TOKENS = 100, 200
#: Requests of a batch: far more than are done in a round.
LINES, LINE_TOKENS = 2000, 100
#: Rows of the batch that run before streams begin.
NUM_ROWS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """All streams of one round."""

    round: int
    streams: int
    has_batch: bool
    ttft_ms: float
    itl_ms: list[float]
    batch_tokens_per_s: float


async def _stream(client: openai.AsyncOpenAI, rng: random.Random) -> tuple[float, list[float]]:
    """Time to the first token, and between tokens, in seconds."""
    started_at, times = time.perf_counter(), list[float]()
    stream = await client.completions.create(
        model=MODEL,
        prompt=[rng.randrange(100, 10_000) for _ in range(PROMPT_TOKENS)],
        max_tokens=OUTPUT_TOKENS,
        temperature=1.0,
        seed=rng.randrange(2**31),
        stream=True,
        extra_body={"ignore_eos": True},
    )
    async for _ in stream:
        times.append(time.perf_counter())
    return times[0] - started_at, [later - earlier for earlier, later in itertools.pairwise(times)]


def _lines(rng: random.Random) -> bytes:
    return b"".join(
        json.dumps(
            {
                "custom_id": f"line-{number}",
                "method": "POST",
                "url": "/v1/completions",
                "body": {
                    "model": MODEL,
                    "prompt": [rng.randrange(100, 10_000) for _ in range(PROMPT_TOKENS)],
                    "max_tokens": LINE_TOKENS,
                    "ignore_eos": True,
                },
            }
        ).encode()
        + b"\n"
        for number in range(LINES)
    )


async def _start_batch(client: openai.AsyncOpenAI, cluster: Cluster, rng: random.Random) -> str:
    """A batch of which several rows run."""
    file = await client.files.create(file=("lines.jsonl", _lines(rng)), purpose="batch")
    batch = await client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    await cluster.until_async(lambda: cluster.view().router.running >= NUM_ROWS, "rows of the batch run")
    return batch.id


def _generated(cluster: Cluster) -> float:
    """Tokens that the router has sent so far."""
    return cluster.metric(f"127.0.0.1:{cluster.port}", "pdserve_generation_tokens_total")


async def _round(client: openai.AsyncOpenAI, cluster: Cluster, number: int, streams: int, *, has_batch: bool) -> Sample:
    rng = random.Random(number)
    batch_id = await _start_batch(client, cluster, rng) if has_batch else None
    before, started_at = await asyncio.to_thread(_generated, cluster), time.perf_counter()
    taken = await asyncio.gather(*(_stream(client, random.Random(f"{number}/{index}")) for index in range(streams)))
    elapsed_s, after = time.perf_counter() - started_at, await asyncio.to_thread(_generated, cluster)
    if batch_id is not None:
        await client.batches.cancel(batch_id)
    await asyncio.to_thread(cluster.wait_idle, timeout_s=60.0)
    ttft, intervals = zip(*taken, strict=True)
    return Sample(
        round=number,
        streams=streams,
        has_batch=has_batch,
        ttft_ms=1000 * statistics.median(ttft),
        itl_ms=[1000 * each for each in itertools.chain.from_iterable(intervals)],
        batch_tokens_per_s=max(0.0, after - before - streams * OUTPUT_TOKENS) / elapsed_s,
    )


async def measured(rounds: int, streams: Sequence[int], itl_budget_ms: float) -> list[Sample]:
    """All samples, in the order in which they were taken."""
    samples: list[Sample] = []
    with tempfile.TemporaryDirectory() as directory:
        flags = ("--state-url", f"file:{directory}/state", "--itl-budget-ms", str(itl_budget_ms))
        with running_cluster(Path(directory), *flags) as cluster:
            async with cluster.async_client() as client:
                await _stream(client, random.Random("warm"))
                for number in range(rounds):
                    for count in streams:
                        kinds = (False, True) if number % 2 else (True, False)
                        samples += [await _round(client, cluster, number, count, has_batch=each) for each in kinds]
    return samples


def report(samples: Sequence[Sample], itl_budget_ms: float) -> str:
    """A Markdown table."""
    lines = [
        f"ITL budget: {itl_budget_ms:g} ms.",
        "",
        "| streams | batch | first token, ms | ITL p50, ms | p99 | within the budget | tokens/s of the batch |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for count in dict.fromkeys(each.streams for each in samples):
        for has_batch in (False, True):
            of = [each for each in samples if (each.streams, each.has_batch) == (count, has_batch)]
            itl = sorted(itertools.chain.from_iterable(each.itl_ms for each in of))
            p50, p99 = (itl[int(share * (len(itl) - 1))] for share in (0.5, 0.99))
            within = sum(each <= itl_budget_ms for each in itl) / len(itl)
            ttft = statistics.median(each.ttft_ms for each in of)
            speed = statistics.median(each.batch_tokens_per_s for each in of)
            values = f"{ttft:.0f} | {p50:.1f} | {p99:.1f} | {within:.1%} | {speed:.0f}"
            lines.append(f"| {count} | {'yes' if has_batch else 'no'} | {values} |")
    return "\n".join(lines)


def main() -> None:
    """Measures, prints the table, and writes it with the raw results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--itl-budget-ms", type=float, default=30.0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    samples = asyncio.run(measured(arguments.rounds, arguments.streams, arguments.itl_budget_ms))
    table = report(samples, arguments.itl_budget_ms)
    print(table)
    if arguments.out is not None:
        environment = describe()
        raw = {"environment": environment, "itl_budget_ms": arguments.itl_budget_ms, "rounds": arguments.rounds}
        raw |= {"samples": [asdict(each) for each in samples]}
        write_results(
            arguments.out, "best-effort", raw, f"# Batches and streams\n\n{heading(environment, 'Times')}{table}\n"
        )


if __name__ == "__main__":
    main()
