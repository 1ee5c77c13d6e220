"""Garbage at the ports of UCX, whose own protocol has no authentication. With the guard nothing of it arrives.

Without, it ends workers, which start again; no router ends, and no token is wrong (decision 38).
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from pdserve.peers.tcp_filter import filter_refusal
from tests.support.cluster import Cluster, running_cluster
from tests.support.depth import IS_FULL
from tests.support.exposed import streams, ucx_ports
from tests.support.lazily import openai
from tests.support.ucx_garbage import send_garbage

pytestmark = pytest.mark.timeout(600)

ROUNDS = 4
FLAGS = ("--dtype", "float32", "--kv-cache-memory", "512MiB")
#: UCX listens from the start then, and blocks pass through it.
BETWEEN_HOSTS = {"PDSERVE_PREFILL__LOCAL_SOCKETS": "off", "PDSERVE_DECODE__LOCAL_SOCKETS": "off"}
WITHOUT_GUARD = {"PDSERVE_PREFILL__GUARD_TRANSPORT": "off", "PDSERVE_DECODE__GUARD_TRANSPORT": "off"}


async def _answers_during_garbage(cluster: Cluster, seed: int) -> tuple[list[str | openai.APIError], set[int]]:
    """Answers while all ports get garbage, and answers that start while those connections are open.

    Also how many bytes of it the kernel took, by connection.
    """
    started, taken = asyncio.Semaphore(0), set[int]()
    with contextlib.ExitStack() as open_ones:
        running = asyncio.create_task(streams(cluster, f"running {seed}", started))
        await asyncio.wait_for(started.acquire(), 60)
        for port in set().union(*ucx_ports(cluster).values()):
            taken |= set(await asyncio.to_thread(send_garbage, port, open_ones, seed=seed))
        return [*await running, *await streams(cluster, f"after {seed}", started)], taken


@pytest.mark.skipif(bool(filter_refusal()), reason="the kernel refuses filters on TCP sockets")
async def test_with_the_guard_garbage_ends_no_process_and_changes_no_answer(tmp_path: Path, model: str) -> None:
    """No kernel takes a byte of it."""
    with running_cluster(tmp_path, *FLAGS, model=model, **BETWEEN_HOSTS) as cluster:
        before = {name: each.pid for name, each in cluster.processes().items()}
        expected = await streams(cluster, "before", asyncio.Semaphore(0))
        assert all(isinstance(answer, str) and answer for answer in expected)
        ports = ucx_ports(cluster)
        assert set(ports) == {"prefill-0", "decode-0"}
        assert all(ports.values())
        assert await _answers_during_garbage(cluster, 0) == ([*expected, *expected], {0})
        assert {name: each.pid for name, each in cluster.processes().items()} == before


@pytest.mark.skipif(not IS_FULL, reason="takes a minute: `make test-all ARGS=ucx-without-guard` runs it")
async def test_without_the_guard_garbage_ends_no_router_and_makes_no_token_wrong(tmp_path: Path, model: str) -> None:
    with running_cluster(tmp_path, *FLAGS, model=model, **BETWEEN_HOSTS, **WITHOUT_GUARD) as cluster:
        before = {name: each.pid for name, each in cluster.processes().items()}
        expected = await streams(cluster, "before", asyncio.Semaphore(0))
        assert all(isinstance(answer, str) and answer for answer in expected)
        for seed in range(ROUNDS):
            answers, _ = await _answers_during_garbage(cluster, seed)
            for answer, right in zip(answers, [*expected, *expected], strict=True):
                assert answer == right or isinstance(answer, openai.APIError)
            await asyncio.to_thread(cluster.wait_tiers, prefill=1, decode=1)
        after = {name: each.pid for name, each in cluster.processes().items()}
        assert after["router"] == before["router"]
        # What was sent was worth sending.
        assert after["decode-0"] != before["decode-0"]
        assert await streams(cluster, "at last", asyncio.Semaphore(0)) == expected
