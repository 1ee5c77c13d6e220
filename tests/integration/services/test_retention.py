"""A router that holds its call open finds the prompt's blocks again, however many prompts came meanwhile."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from pdserve.v1 import prefill_pb2
from tests.integration.services.local_cluster import DEADLINE_S, LocalCluster, RouterRequest, running_cluster
from tests.support.redis import eventually
from tests.unit.model.tiny import save_model

Call = grpc.aio.UnaryStreamCall[prefill_pb2.PrefillRequest, prefill_pb2.PrefillResponse]
PROMPT = [(7 * position) % 90 + 3 for position in range(45)]
#: Tokens of its full blocks, which have four each.
CACHED = 44


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("tiny"))


async def _retained(request: RouterRequest) -> Call:
    """The call of a prompt that is handed over, still open."""
    await request.start()
    call = request.prefill_call(await request.ticket(), retains_prompt=True)
    async with asyncio.timeout(DEADLINE_S):
        async for event in call:
            if event.HasField("done"):
                return call
    raise AssertionError("the prefill worker ended the stream without being done")


async def _num_retained(cluster: LocalCluster) -> int:
    return await cluster.prefill.run(lambda: cluster.prefill.model.pool.num_retained)


async def _until_retained(cluster: LocalCluster, count: int) -> None:
    """The call is answered before the blocks are retained, and ends before they are not."""

    async def are_retained() -> bool:
        return await _num_retained(cluster) == count

    await eventually(are_retained)


async def _fill_cache(cluster: LocalCluster) -> None:
    """Other prompts take every block of the prefill worker's pool that they can get."""
    for number in range(2 * cluster.prefill.model.pool.num_blocks // len(PROMPT) * 4):
        await cluster.request([number + 3, *PROMPT[1:]], max_tokens=1).prefill(None)


@pytest.mark.parametrize("retains", [True, False])
async def test_a_prompt_that_comes_again_is_cached(model: Path, retains: bool) -> None:
    async with running_cluster(model) as cluster:
        call = await _retained(cluster.request(PROMPT))
        await _until_retained(cluster, CACHED // 4)
        if not retains:
            call.cancel()
            await _until_retained(cluster, 0)
        await _fill_cache(cluster)
        done = await cluster.request(PROMPT).prefill(None)
        assert done.cached_tokens == (CACHED if retains else 0)


async def test_a_newer_attempt_ends_the_retention_of_an_older_one(model: Path) -> None:
    async with running_cluster(model) as cluster:
        request = cluster.request(PROMPT)
        call = await _retained(request)
        await _until_retained(cluster, CACHED // 4)
        again = request.prefill_call(None, attempt=2)
        async with asyncio.timeout(DEADLINE_S):
            events = [event async for event in again]
            assert events[-1].done.cached_tokens == CACHED
            assert await call.code() is grpc.StatusCode.OK
        await _until_retained(cluster, 0)


async def test_the_call_of_a_prompt_that_gives_way_ends(model: Path) -> None:
    async with running_cluster(model) as cluster:
        first = await _retained(cluster.request(PROMPT))
        async with asyncio.timeout(DEADLINE_S):
            for number in range(cluster.prefill.model.pool.num_blocks // (CACHED // 4)):
                await _retained(cluster.request([number + 3, *PROMPT[1:]]))
            assert await first.code() is grpc.StatusCode.OK
        pool = cluster.prefill.model.pool
        assert 0 < await _num_retained(cluster) <= pool.num_blocks // 2


async def test_a_worker_that_drains_does_not_wait_for_retentions_and_its_server_neither(model: Path) -> None:
    async with running_cluster(model) as cluster:
        call = await _retained(cluster.request(PROMPT))
        await _until_retained(cluster, CACHED // 4)
        cluster.prefill.calls.drain()
        async with asyncio.timeout(DEADLINE_S):
            await cluster.prefill.calls.wait_idle()
            assert cluster.prefill_service is not None
            cluster.prefill_service.end_idle()
            assert await call.code() is grpc.StatusCode.OK
        await _until_retained(cluster, 0)
