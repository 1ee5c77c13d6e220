"""A prefill worker that has handed a prompt over retains it as long as the request runs, and no longer."""

from __future__ import annotations

import asyncio
from pathlib import Path

from pdserve.cli.private_redis import PrivateRedis
from tests.integration.router_svc.conftest import ScriptedCluster, open_cluster
from tests.integration.router_svc.request.support import ONE_OF_EACH, TEXT, after_first_token, both
from tests.integration.router_svc.script import Context, vanish
from tests.support.tiny_model import NAME


async def test_the_call_to_the_prefill_worker_stays_open_until_the_answer_is_complete(
    redis_server: PrivateRedis, model_dir: Path
) -> None:
    async with open_cluster(redis_server, model_dir, ONE_OF_EACH) as cluster:

        async def is_retained(_: Context) -> None:
            await cluster.calls.until(lambda: cluster.calls.num_retained == 1)

        cluster.script.fail("decode_token", None, after_first_token(cluster, is_retained))
        text, _ = await cluster.stream()
        assert text == TEXT
        await cluster.calls.until(lambda: cluster.calls.num_retained == 0)


async def test_it_ends_when_its_client_leaves(redis_server: PrivateRedis, model_dir: Path) -> None:
    async with open_cluster(redis_server, model_dir, ONE_OF_EACH) as cluster:
        cluster.script.pace = asyncio.Semaphore(0)
        body = {"model": NAME, "prompt": "Say hello", "max_tokens": 50, "stream": True}
        async with cluster.http.post(f"{cluster.base_url}/v1/completions", json=body):
            await cluster.calls.until(lambda: cluster.calls.num_retained == 1)
        await cluster.calls.until(lambda: cluster.calls.num_retained == 0)


async def test_a_request_that_loses_its_decode_worker_is_retained_once(cluster: ScriptedCluster) -> None:
    """By the worker that had it last."""
    seen = list[int]()

    async def count(_: Context) -> None:
        await cluster.calls.until(lambda: cluster.calls.num_retained > 0)
        seen.append(cluster.calls.num_retained)

    cluster.script.fail("decode_token", both(count, vanish), count)
    text, _ = await cluster.stream()
    assert text == TEXT
    assert seen == [1, 1]
    await cluster.calls.until(lambda: cluster.calls.num_retained == 0)
