"""The console of a router in operation."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp

from pdserve.cli.private_redis import PrivateRedis
from tests.integration.router_svc.conftest import ScriptedCluster, open_cluster
from tests.support.deadline import DEADLINE_S

ONE_OF_EACH = {"prefill-0": "prefill", "decode-0": "decode"}


async def first_state(response: aiohttp.ClientResponse) -> dict[str, Any]:
    async with asyncio.timeout(DEADLINE_S):
        event = await response.content.readuntil(b"\n\n")
    state: dict[str, Any] = json.loads(event.decode().split("data: ", 1)[1])["state"]
    return state


async def test_the_state_has_the_workers_and_the_request_just_sent(small_cluster: ScriptedCluster) -> None:
    _, answer = await small_cluster.complete()
    async with small_cluster.http.get(f"{small_cluster.base_url}/console") as page:
        assert (page.status, page.content_type) == (200, "text/html")
    async with small_cluster.http.get(f"{small_cluster.base_url}/console/events") as stream:
        state = await first_state(stream)
    assert set(state["workers"]) == {"prefill-0", "decode-0"}
    assert state["router"]["status"] == "ready"
    assert state["problems"] == []
    request = state["requests"][answer["id"]]
    assert request["state"] == "finished"
    # The commit of a scripted worker may overtake its first token: then no time is left for the wire.
    phases = [start["phase"] for start in request["timeline"] if start["phase"] != "wire"]
    assert phases == ["queue", "reserve", "prefill", "decode"]


async def test_an_open_console_does_not_delay_the_routers_end(redis_server: PrivateRedis, model_dir: Path) -> None:
    async with aiohttp.ClientSession() as http:
        async with open_cluster(redis_server, model_dir, ONE_OF_EACH) as cluster:
            stream = await http.get(f"{cluster.base_url}/console/events")
            await first_state(stream)
        # The stream has ended by itself: after the server's grace it would be cut off, and reading would raise.
        assert isinstance(await stream.read(), bytes)


async def test_without_the_console_nothing_of_it_is_served(redis_server: PrivateRedis, model_dir: Path) -> None:
    async with open_cluster(redis_server, model_dir, ONE_OF_EACH, console=False) as cluster:
        for path in ("/console", "/console/", "/console/main.js", "/console/events"):
            assert (await cluster.get(path))[0] == 404
        assert (await cluster.get("/v1/requests"))[0] == 200


async def test_the_routers_limit_of_consoles_is_that_of_its_flag(redis_server: PrivateRedis, model_dir: Path) -> None:
    async with open_cluster(redis_server, model_dir, ONE_OF_EACH, console_clients=1) as cluster:
        async with cluster.http.get(f"{cluster.base_url}/console/events") as stream:
            await first_state(stream)
            status, body = await cluster.get("/console/events")
        assert status == 429
        assert "limit 1 (--console-clients)" in body["error"]["message"]
