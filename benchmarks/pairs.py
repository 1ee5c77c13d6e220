"""`python -m benchmarks.pairs BEFORE_URL AFTER_URL`: whether a change costs anything, from two clusters in turns.

Start both clusters on one machine, of two checkouts with the same flags. Each pair has one burst of the same requests
on each, in an order that alternates: a single request for TTFT and TPOT, and 16 at once for the output. Shown is the
median of the ratios after / before with its 95 % interval. Bursts are short, so that both of a pair meet the same
machine. A cluster without requests costs nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime as dt
import math
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import openai

from benchmarks.environment import describe, heading
from benchmarks.result_files import write_results

PROMPT_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Requests of one burst, and how many pairs of bursts there are by default."""

    concurrency: int
    output_tokens: int
    pairs: int


LOADS = (Load(concurrency=1, output_tokens=64, pairs=300), Load(concurrency=16, output_tokens=64, pairs=120))


@dataclass(frozen=True, slots=True)
class Answer:
    """When the tokens of a request came, in seconds from its start on."""

    first_s: float
    last_s: float
    tokens: int


async def _answer(client: openai.AsyncOpenAI, model: str, prompt: list[int], tokens: int) -> Answer:
    started_at, times = time.perf_counter(), list[float]()
    stream = await client.completions.create(
        model=model, prompt=prompt, max_tokens=tokens, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    async for _ in stream:
        times.append(time.perf_counter() - started_at)
    return Answer(times[0], times[-1], tokens)


async def burst(client: openai.AsyncOpenAI, model: str, load: Load, seed: int) -> dict[str, float]:
    """The figures of one burst: prompts of 256 random tokens, at temperature 0."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(100, 10_000) for _ in range(PROMPT_TOKENS)] for _ in range(load.concurrency)]
    started_at = time.perf_counter()
    answers = await asyncio.gather(*(_answer(client, model, prompt, load.output_tokens) for prompt in prompts))
    if load.concurrency > 1:
        return {"output_throughput": sum(each.tokens for each in answers) / (time.perf_counter() - started_at)}
    [answer] = answers
    return {
        "ttft_ms": 1000 * answer.first_s,
        "tpot_ms": 1000 * (answer.last_s - answer.first_s) / (answer.tokens - 1),
    }


def median_interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """The median of at least 8 ratios, and the ends of its 95 % interval, whatever their distribution."""
    ranked, count = sorted(ratios), len(ratios)
    below = max(0, math.floor((count - 1.96 * math.sqrt(count)) / 2) - 1)
    return statistics.median(ranked), ranked[below], ranked[count - 1 - below]


async def measured(urls: tuple[str, str], loads: Sequence[Load]) -> dict[str, list[tuple[float, float]]]:
    """The figures before and after of each pair."""
    samples: dict[str, list[tuple[float, float]]] = {}
    clients = [openai.AsyncOpenAI(base_url=f"{url.rstrip('/')}/v1", api_key="none", max_retries=0) for url in urls]
    [model] = [each.id for each in (await clients[0].models.list()).data]
    for load in loads:
        for seed in range(-8, load.pairs):
            order = (0, 1) if seed % 2 == 0 else (1, 0)
            found = {index: await burst(clients[index], model, load, seed) for index in order}
            for name in found[0] if seed >= 0 else ():  # The first bursts warm up.
                samples.setdefault(name, []).append((found[0][name], found[1][name]))
    for client in clients:
        await client.close()
    return samples


def main() -> None:
    """Prints a line for each figure, and writes all samples."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pairs", description=__doc__)
    parser.add_argument("before")
    parser.add_argument("after")
    parser.add_argument("--title", required=True, help="what was changed")
    parser.add_argument("--directory", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    samples = asyncio.run(measured((arguments.before, arguments.after), LOADS))
    machine = describe()
    lines = [f"# {arguments.title}", "", heading(machine, "Pairs of bursts"), ""]
    lines += ["| figure | pairs | before | after | median ratio | 95 % |", "| --- | --- | --- | --- | --- | --- |"]
    for name, pairs in samples.items():
        ratio, low, high = median_interval([after / before for before, after in pairs])
        before, after = (statistics.median(column) for column in zip(*pairs, strict=True))
        lines.append(f"| {name} | {len(pairs)} | {before:.2f} | {after:.2f} | {ratio:.4f} | {low:.4f} to {high:.4f} |")
    today = dt.datetime.now(tz=dt.UTC).date()
    raw = {"title": arguments.title, "machine": machine, "samples": samples}
    write_results(arguments.directory, f"pairs-{today}", raw, "\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
