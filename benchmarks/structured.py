"""What structured output costs: time per token of streams with a JSON schema, and time to the first token of a new one.

    python -m benchmarks.structured [--rounds 12] [--tokens 128] [--vocabulary 151936] [--out benchmarks/results]

A cluster of `pdserve up` gets prompts of the same length in turns: with a JSON schema for a long list of texts, and
without. Either way a stream has a fixed number of tokens. Each round has 1 stream, then 16 at a time, in either order
of the two kinds. A round is compared with itself: the ratio of the medians of both, and the difference of their first
tokens. Prompts are random, so none is cached, and each stream with a schema has one of its own, which no worker has
seen. With --vocabulary, the default model is given more tokens, up to that number.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import openai

from benchmarks.environment import describe, heading
from benchmarks.result_files import write_results
from tests.support.cluster import MODEL, Cluster, running_cluster
from tests.support.default_model import write_larger_vocabulary

STREAMS = (1, 16)
PROMPT_TOKENS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """All streams of one kind in one round: medians."""

    round: int
    streams: int
    has_schema: bool
    ttft_ms: float
    tpot_ms: float


async def _stream(
    client: openai.AsyncOpenAI, rng: random.Random, tokens: int, *, has_schema: bool
) -> tuple[float, float]:
    """Time to the first token, and per token behind it, in seconds."""
    body: dict[str, Any] = {"ignore_eos": True}
    if has_schema:
        name = f"text_{rng.randrange(10**9)}"
        texts = {"type": "array", "items": {"type": "string"}, "minItems": tokens // 2}
        schema = {"type": "object", "properties": {name: texts}}
        body = {"structured_outputs": {"json": schema | {"required": [name], "additionalProperties": False}}}
    started_at, times = time.perf_counter(), list[float]()
    stream = await client.completions.create(
        model=MODEL,
        prompt=[rng.randrange(100, 10_000) for _ in range(PROMPT_TOKENS)],
        max_tokens=tokens,
        temperature=1.0,
        seed=rng.randrange(2**31),
        stream=True,
        extra_body=body,
    )
    async for _ in stream:
        times.append(time.perf_counter())
    return times[0] - started_at, (times[-1] - times[0]) / (tokens - 1)


async def measured(rounds: int, tokens: int, vocab_size: int | None) -> list[Sample]:
    """All samples, in the order in which they were taken."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        model = MODEL if vocab_size is None else str(write_larger_vocabulary(directory / "model", vocab_size))
        with running_cluster(directory, model=model) as cluster:
            return await _measured(cluster, rounds, tokens)


async def _measured(cluster: Cluster, rounds: int, tokens: int) -> list[Sample]:
    samples: list[Sample] = []
    async with cluster.async_client() as client:
        await _stream(client, random.Random("warm"), tokens, has_schema=True)
        for number, streams in itertools.product(range(rounds), STREAMS):
            for has_schema in (False, True) if number % 2 else (True, False):
                taken = await asyncio.gather(
                    *(
                        _stream(client, random.Random(f"{number}/{has_schema}/{index}"), tokens, has_schema=has_schema)
                        for index in range(streams, 2 * streams)
                    )
                )
                ttft, tpot = (1000 * statistics.median(values) for values in zip(*taken, strict=True))
                samples.append(Sample(round=number, streams=streams, has_schema=has_schema, ttft_ms=ttft, tpot_ms=tpot))
    return samples


def report(samples: Sequence[Sample]) -> str:
    """A Markdown table."""
    lines = [
        "| streams | ms per token, free | with a schema | ratio, median (p25 to p75) | first token later by, ms |",
        "| --- | --- | --- | --- | --- |",
    ]
    for streams in STREAMS:
        of = {
            kind: [each for each in samples if (each.streams, each.has_schema) == (streams, kind)]
            for kind in (False, True)
        }
        pairs = list(zip(of[False], of[True], strict=True))
        low, middle, high = statistics.quantiles([held.tpot_ms / free.tpot_ms for free, held in pairs], n=4)
        # At 16 at a time, the first token comes when the prompts of the others are computed, in one order or another.
        later = "-" if streams > 1 else f"{statistics.median(held.ttft_ms - free.ttft_ms for free, held in pairs):.1f}"
        free_ms, held_ms = (statistics.median(each.tpot_ms for each in of[kind]) for kind in (False, True))
        lines.append(
            f"| {streams} | {free_ms:.2f} | {held_ms:.2f} | {middle:.3f} ({low:.3f} to {high:.3f}) | {later} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measures, prints the table, and writes it with the raw results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--vocabulary", type=int)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    samples = asyncio.run(measured(arguments.rounds, arguments.tokens, arguments.vocabulary))
    table = report(samples)
    print(table)
    if arguments.out is not None:
        environment = describe()
        raw = {"environment": environment, "settings": {**vars(arguments), "out": None}}
        raw |= {"samples": [asdict(each) for each in samples]}
        size = "" if arguments.vocabulary is None else f"-{arguments.vocabulary}"
        name = f"structured{size}-{environment['date']}"
        write_results(arguments.out, name, raw, f"# Structured output\n\n{heading(environment, 'Times')}{table}\n")


if __name__ == "__main__":
    main()
