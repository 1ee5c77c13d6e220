"""How a request ends early: by a stop string, or because its client disconnects."""

from __future__ import annotations

import asyncio

import pytest

from tests.integration.router_svc.conftest import ScriptedCluster
from tests.integration.router_svc.request.support import (
    after_first_token,
    go_on,
)
from tests.integration.router_svc.script import Context, hang
from tests.support.tiny_model import tokens_of


async def test_a_stop_string_ends_one_choice_while_another_goes_on(cluster: ScriptedCluster) -> None:
    cluster.script.replies = [tokens_of("one STOP two"), tokens_of("a longer text without it")]
    cluster.script.fail("decode_token", after_first_token(cluster, go_on))
    _, body = await cluster.complete(n=2, stop=["STOP"])
    first, second = body["choices"]
    assert (first["text"], first["finish_reason"], first["stop_reason"]) == ("one ", "stop", "STOP")
    assert (second["text"], second["finish_reason"]) == ("a longer text without it", "length")
    await cluster.calls.until(lambda: "stop_choice" in cluster.calls.commands)


@pytest.mark.parametrize("point", ["decode", "decode_ticket", "prefill", "prefill_token", "decode_started"])
async def test_a_client_that_disconnects_ends_the_work_in_every_phase(
    small_cluster: ScriptedCluster, point: str
) -> None:
    reached = asyncio.Event()

    async def reach_and_hang(context: Context) -> None:
        reached.set()
        await hang(context)

    small_cluster.script.fail(point, reach_and_hang)
    request = asyncio.create_task(small_cluster.complete())
    await reached.wait()
    request.cancel()
    await small_cluster.calls.until(lambda: small_cluster.calls.num_open == 0)
    record = await small_cluster.only_trace()
    assert record["state"] == "cancelled"
    assert await small_cluster.metric("num_requests_running") == 0


async def test_a_client_that_disconnects_in_mid_stream_ends_the_work(small_cluster: ScriptedCluster) -> None:
    small_cluster.script.pace = asyncio.Semaphore(2)
    url = f"{small_cluster.base_url}/v1/completions"
    async with small_cluster.http.post(url, json={"model": "tiny", "prompt": "x", "stream": True}) as response:
        await response.content.readline()
    await small_cluster.calls.until(lambda: small_cluster.calls.num_open == 0)
    record = await small_cluster.only_trace()
    assert record["state"] == "cancelled"
