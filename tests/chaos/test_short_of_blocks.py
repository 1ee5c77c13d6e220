"""A decode worker that is short of blocks, beside one with room: requests move before they would be preempted."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from pdserve.cli.__main__ import main
from tests.chaos.test_worker_lost import choices_of
from tests.support.cluster import Cluster, running_cluster
from tests.support.depth import IS_FULL

pytestmark = [
    pytest.mark.skipif(not IS_FULL, reason="takes half a minute: `make test-all ARGS=chaos` runs it"),
]

#: All streams have some 3,000 tokens, and a worker has blocks for 1,600: two have room for all, and one has not.
MAX_TOKENS, KV_CACHE_MEMORY = 350, "72MiB"
STREAMS = (0, 1, 4, 6, 7)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, model: str) -> Iterator[Cluster]:
    """Two decode workers with few blocks."""
    flags = ("--dtype", "float32", "--kv-cache-memory", KV_CACHE_MEMORY, "--prefill", "1", "--decode", "2")
    flags += ("--trust-request-chat-template",)
    with running_cluster(tmp_path_factory.mktemp("small"), *flags, model=model) as cluster:
        yield cluster


async def test_requests_move_from_a_full_worker_to_one_with_room_and_keep_their_tokens(small: Cluster) -> None:
    """All streams begin on one worker, since the other one was drained when they came."""
    router = f"127.0.0.1:{small.port}"

    async def ran(*arguments: str) -> None:
        assert await asyncio.to_thread(main, [*arguments, "--base-url", small.base_url]) == 0

    async with small.async_client() as client:
        undisturbed = [await choices_of(client, number, max_tokens=MAX_TOKENS) for number in STREAMS]
        await ran("drain", "decode-1")
        async with asyncio.TaskGroup() as tasks:
            streams = [tasks.create_task(choices_of(client, number, max_tokens=MAX_TOKENS)) for number in STREAMS]
            await small.until_async(
                lambda: sum(each.running for each in small.workers("decode")) >= len(STREAMS), "all streams run"
            )
            await ran("drain", "decode-1", "--undo")
        assert [stream.result() for stream in streams] == undisturbed
    assert small.metric(router, "pdserve_migrations_total", reason="full", outcome="moved") > 0
    assert small.metric(router, "pdserve_request_outcomes_total", outcome="failed") == 0
    small.wait_tiers(prefill=1, decode=2)
    small.wait_idle()
