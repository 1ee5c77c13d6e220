"""Promise 1 with real processes: tokens depend neither on other requests nor on disaggregation.

Only the full depth computes in float32, and runs 32 streams of 24 tokens instead of 16 streams of 10.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest

from tests.support import depth
from tests.support.cluster import MODEL, Cluster

TOPICS = ("the sea", "a small dog", "prime numbers", "Seoul", "winter", "bread", "a lost key", "trains")
#: Every topic greedily and sampled, in every length; 32 also fill more of a batch.
NUM_STREAMS, NUM_TOKENS = (32, 24) if depth.IS_FULL else (16, 10)
pytestmark = pytest.mark.timeout(400)


@dataclass(frozen=True, slots=True)
class _Case:
    prompt: str
    temperature: float
    seed: int


CASES = [
    _Case(
        prompt=f"Tell me about {TOPICS[number % len(TOPICS)]}. " * (1 + 3 * (number % 7)),
        temperature=0.0 if number % 2 else 0.8,
        seed=number,
    )
    for number in range(NUM_STREAMS)
]


async def _generate(cluster: Cluster, *, together: bool) -> list[tuple[str, ...]]:
    """The tokens of every case, streamed one at a time or all at once."""
    gate = asyncio.Semaphore(NUM_STREAMS if together else 1)
    async with cluster.async_client() as client:

        async def one(case: _Case) -> tuple[str, ...]:
            async with gate:
                stream = await client.completions.create(
                    model=MODEL,
                    prompt=case.prompt,
                    temperature=case.temperature,
                    seed=case.seed,
                    max_tokens=NUM_TOKENS,
                    stream=True,
                    logprobs=0,
                )
                logprobs = [chunk.choices[0].logprobs async for chunk in stream]
                return tuple(token for one in logprobs if one for token in one.tokens or ())

        return await asyncio.gather(*(one(case) for case in CASES))


async def test_concurrent_streams_have_the_tokens_of_each_alone_and_of_a_cluster_without_prefill_workers(
    cluster: Cluster, monolith: Cluster
) -> None:
    together = await _generate(cluster, together=True)
    alone = await _generate(cluster, together=False)
    monolithic = await _generate(monolith, together=True)
    assert all(len(tokens) > 1 for tokens in together)
    assert together == alone
    assert together == monolithic
