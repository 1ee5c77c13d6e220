"""Workers change their roles under load: streams are those of an undisturbed run, and either tier may be lost."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from pdserve.cli.__main__ import main
from tests.chaos.test_worker_lost import BODIES, choices_of, streams_until
from tests.support.cluster import Cluster, running_cluster
from tests.support.depth import IS_FULL

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(not IS_FULL, reason="takes half a minute: `make test-all ARGS=chaos` runs it"),
]

MAX_TOKENS = 300
#: Much longer than a restart takes, and than a change by hand.
POLICY = {"PDSERVE_ROUTER__ROLE_POLICY": "auto", "PDSERVE_ROUTER__ROLE_POLICY_AFTER_S": "8"}
STREAMS = range(len(BODIES))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, model: str) -> Iterator[Cluster]:
    """One worker of each tier."""
    flags = ("--dtype", "float32", "--kv-cache-memory", "256MiB", "--drain-timeout-s", "1")
    with running_cluster(tmp_path_factory.mktemp("pair"), *flags, model=model, **POLICY) as cluster:
        yield cluster


async def change(cluster: Cluster, worker: str, role: str, *more: str) -> int:
    """Runs `pdserve role`; returns its exit code once the router has seen the change."""
    code = await asyncio.to_thread(main, ["role", worker, role, *more, "--base-url", cluster.base_url])
    if not code:
        await cluster.until_async(
            lambda: worker in [each.worker_id for each in cluster.workers(role)], f"the router sees that {worker} moved"
        )
    return code


async def test_roles_change_under_streams_that_lose_no_token(pair: Cluster) -> None:
    """Both workers swap their roles and back; then the only decode worker is killed, and the other one serves on."""
    router = f"127.0.0.1:{pair.port}"
    epochs = {worker.worker_id: worker.epoch for worker in pair.view().workers}
    async with pair.async_client() as client:
        undisturbed = [await choices_of(client, number, max_tokens=MAX_TOKENS) for number in STREAMS]
        is_over = asyncio.Event()

        async with asyncio.TaskGroup() as tasks:
            streams = [
                tasks.create_task(streams_until(is_over, client, number, undisturbed[number], max_tokens=MAX_TOKENS))
                for number in STREAMS
            ]
            assert await change(pair, "decode-0", "prefill") == 1  # The last one keeps its role.
            assert await change(pair, "prefill-0", "decode") == 0
            assert await change(pair, "decode-0", "prefill") == 0
            assert await change(pair, "decode-0", "decode", "--no-wait") == 0
            assert await change(pair, "prefill-0", "prefill", "--no-wait") == 0
            assert {worker.worker_id: worker.epoch for worker in pair.view().workers} == epochs
            assert await change(pair, "prefill-0", "decode") == 0
            pair.kill("decode-0")
            is_over.set()
        assert all(stream.result() > 0 for stream in streams)
    assert pair.metric(router, "pdserve_request_outcomes_total", outcome="failed") == 0
    await pair.until_async(lambda: len(pair.workers("decode")) == 2, "the killed worker is back", timeout_s=90)
    assert await change(pair, "prefill-0", "prefill") == 0
    pair.wait_tiers(prefill=1, decode=1)
    pair.wait_idle()


async def test_the_policy_moves_the_prefill_worker_while_the_decode_worker_is_away_and_back(pair: Cluster) -> None:
    """Requests wait for the policy alone, and are served by the worker that is left."""
    router = f"127.0.0.1:{pair.port}"

    async def drain(*arguments: str) -> None:
        command = ["drain", "decode-0", "--no-wait", "--force", *arguments, "--base-url", pair.base_url]
        assert await asyncio.to_thread(main, command) == 0

    async with pair.async_client() as client:
        undisturbed = [await choices_of(client, number, max_tokens=MAX_TOKENS) for number in STREAMS]
        await drain()
        streams = [asyncio.create_task(choices_of(client, number, max_tokens=MAX_TOKENS)) for number in STREAMS]
        assert await asyncio.gather(*streams) == undisturbed
        assert [worker.worker_id for worker in pair.workers("decode")] == ["prefill-0"]
        await drain("--undo")
        await pair.until_async(lambda: pair.workers("prefill"), "the worker is back in its tier", timeout_s=60)
    assert pair.metric(router, "pdserve_request_outcomes_total", outcome="failed") == 0
    pair.wait_tiers(prefill=1, decode=1)
    pair.wait_idle()
