"""Requests are served while Redis is away, and state is restored when it is back."""

from __future__ import annotations

import asyncio
from pathlib import Path

from pdserve.cli.private_redis import PrivateRedis
from pdserve.peers.registry import RECORD_TTL_S
from tests.support.cluster import MODEL, Cluster, running_cluster

#: Pause of a client between two answers, which leaves the cores to other tests.
THINK_S = 0.5


def _answer(cluster: Cluster, number: int) -> int:
    """The number of tokens of a short answer."""
    client = cluster.client()
    with client:
        response = client.completions.create(
            model=MODEL, prompt=f"Number {number}. " * 60, max_tokens=4, temperature=0, extra_body={"ignore_eos": True}
        )
    return response.usage.completion_tokens if response.usage else 0


async def test_serving_goes_on_while_redis_is_away_and_the_registry_comes_back(tmp_path: Path, model: str) -> None:
    async with PrivateRedis() as redis:
        with running_cluster(tmp_path, "--kv-cache-memory", "64MiB", "--redis-url", redis.url, model=model) as cluster:

            async def answers(number: int) -> int:
                return await asyncio.to_thread(_answer, cluster, number)

            assert await answers(1) == 4
            await redis.stop()
            await cluster.until_async(lambda: not cluster.view().redis.available, "the router notices the loss")
            lost_at = asyncio.get_running_loop().time()
            assert "redis" in cluster.view().router.degraded
            # Longer than a record's TTL: the router must keep workers whose records have expired.
            number = 2
            while asyncio.get_running_loop().time() < lost_at + RECORD_TTL_S + 1:
                assert await answers(number) == 4
                number += 1
                await asyncio.sleep(THINK_S)
            await redis.start()
            await cluster.until_async(lambda: cluster.view().redis.available, "the router is back at Redis")
            await cluster.until_async(lambda: not cluster.view().router.degraded, "no longer degraded")
            assert len(cluster.workers("prefill")) == len(cluster.workers("decode")) == 1
            assert await answers(0) == 4
            await asyncio.to_thread(cluster.wait_idle)


def test_a_private_redis_that_is_killed_is_restarted_and_no_request_notices(fragile: Cluster) -> None:
    assert _answer(fragile, 1) == 4
    before = _redis_pid(fragile)
    fragile.kill("redis")
    assert _answer(fragile, 2) == 4
    fragile.until(lambda: _redis_pid(fragile) not in (None, before), "Redis is restarted")
    fragile.until(lambda: fragile.view().redis.available and len(fragile.workers("prefill")) == 2, "workers registered")
    assert _answer(fragile, 3) == 4


def _redis_pid(cluster: Cluster) -> int | None:
    process = cluster.processes().get("redis")
    return process.pid if process else None
