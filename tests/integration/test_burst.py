"""A burst of prompts: both tiers prefill, and each decision record says why."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp

from tests.support.cluster import MODEL, Cluster


def _prompt(first: int, length: int = 256) -> list[int]:
    """Token ids that no other test uses."""
    return [first, *((first * 37 + 11 * index) % 40_000 + 100 for index in range(1, length))]


async def _burst(cluster: Cluster, firsts: range) -> list[dict[str, Any]]:
    """Send these prompts all at once and return their decision records."""
    async with aiohttp.ClientSession(cluster.base_url) as session, asyncio.TaskGroup() as tasks:

        async def one(first: int) -> dict[str, Any]:
            body = {"model": MODEL, "prompt": _prompt(first), "max_tokens": 4, "ignore_eos": True}
            async with session.post("/v1/completions", json=body) as response:
                answer = await response.json()
                assert response.status == 200, answer
            async with session.get(f"/v1/requests/{answer['id']}/trace") as response:
                record: dict[str, Any] = await response.json()
                return record

        sent = [tasks.create_task(one(first)) for first in firsts]
    return [task.result() for task in sent]


def _knows_rates(cluster: Cluster) -> bool:
    return all(worker.prefill_tokens_per_s is not None for worker in cluster.workers("prefill"))


def test_the_decode_worker_prefills_its_share_of_a_burst(cluster: Cluster) -> None:
    # Predictions use measured rates, so a first prompt lets the prefill worker measure its own.
    asyncio.run(_burst(cluster, range(2001, 2002)))
    cluster.until(lambda: _knows_rates(cluster), "a heartbeat with the prefill worker's rate")
    before = cluster.metric(f"127.0.0.1:{cluster.port}", "pdserve_local_prefills_total", reason="load")
    # Enough that a queue forms even when a busy machine sends them slowly.
    records = asyncio.run(_burst(cluster, range(2002, 2034)))
    local = [record for record in records if record["prefilled_by"] == "decode"]
    assert 0 < len(local) < len(records)
    assert {record["local_prefill_reason"] for record in local} == {"load"}
    assert all("prefills by itself" in record["decisions"][0]["why"] for record in local)
    after = cluster.metric(f"127.0.0.1:{cluster.port}", "pdserve_local_prefills_total", reason="load")
    assert after - before == len(local)
    cluster.wait_idle()
