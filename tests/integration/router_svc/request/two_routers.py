"""Two routers of one cluster with scripted workers, and streams that move from one to the other."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pdserve.cli.private_redis import PrivateRedis
from pdserve.net.admin import Health
from pdserve.redis.store import Store
from router_svc.api.served_model import ServedModel
from router_svc.records.stream_log import Ending, StreamLog
from router_svc.service import Router
from tests.integration.router_svc.conftest import ScriptedCluster, open_cluster
from tests.integration.router_svc.request.support import ONE_OF_EACH
from tests.support.redis import eventually, until
from tests.support.tiny_model import END, tokens_of

TEXT = "Hëllo world, this is it."
EVENT = re.compile(rb"(?:id: (?P<id>[^\n]+)\n)?(?:event: [^\n]+\n)?data: (?P<data>[^\n]+)\n\n")


@dataclass
class Pair:
    """Two routers of one cluster; `first` is the one that gets lost."""

    first: ScriptedCluster
    second: ScriptedCluster

    def lose(self) -> None:
        """What a `kill -9` leaves behind: nothing is written any more, and the connections are closed."""

        async def lost(log: StreamLog, ending: Ending, charge: object) -> None:
            log.is_ours = False

        self.first.router._resuming.logs.end = lost  # type: ignore[assignment]

    async def kept(self) -> int:
        """Pieces of output in Redis."""
        async with Store(self.first.router.config.redis_url) as store:
            keys: Any = await store.call("KEYS", store.key("stream-output:*"))
            return sum([int(await store.call("LLEN", key)) for key in keys])  # type: ignore[arg-type]


@asynccontextmanager
async def two_routers(redis: PrivateRedis, model_dir: Path, **settings: Any) -> AsyncIterator[Pair]:
    settings = {"resume_timeout_s": 60.0} | settings
    async with AsyncExitStack() as stack:
        opened = open_cluster(redis, model_dir, ONE_OF_EACH, **settings)
        first = await stack.enter_async_context(opened)
        for worker in first.workers.values():
            worker.set(max_model_len=512)  # The description of tools is long.
        config = first.router.config
        health = Health()
        store = await stack.enter_async_context(Store(config.redis_url, on_change=health.watch("redis")))
        models = [ServedModel.load(directory, name) for name, directory in config.models.items()]
        router = Router(config, models, store, health)
        addresses = await stack.enter_async_context(router.serving())
        url = f"http://{addresses.http}"
        second = replace(first, base_url=url, admin_url=url, grpc_address=addresses.grpc, router=router)
        await second.knows(2)
        await eventually(second.is_ready_if_it_can_be)
        for each in (first, second):
            cluster = each.router.cluster
            await until(cluster.directory, lambda cluster=cluster: cluster.max_model_len(0) == 512)
        first.script.replies = [[*tokens_of(TEXT), END], tokens_of("Another text. "), [*tokens_of("So"), END]]
        yield Pair(first, second)


def events_of(data: bytes) -> list[tuple[str, bytes]]:
    """Id and data of each event, and nothing between them. The first ones may have no id."""
    found = start_of(data)
    assert EVENT.sub(b"", data) == b""
    return found


async def post(router: ScriptedCluster, path: str, body: dict[str, Any], **headers: str) -> bytes:
    async with router.http.post(router.base_url + path, json=body, headers=headers) as response:
        assert response.status == 200, await response.text()
        return await response.read()


async def resume(router: ScriptedCluster, name: str, last: str = "", **headers: str) -> tuple[int, bytes]:
    if last:
        headers["Last-Event-ID"] = last
    async with router.http.get(f"{router.base_url}/v1/requests/{name}/stream", headers=headers) as response:
        return response.status, await response.read()


async def cut(
    pair: Pair, path: str, body: dict[str, Any], num_events: int, *, is_lost: bool = True, **headers: str
) -> bytes:
    """The start of a response, all of it in Redis, and at least up to an event with an id.

    Its router is lost then, or its client leaves.
    """
    pair.first.script.pace = pace = asyncio.Semaphore(0)
    before = await pair.kept()

    async def is_kept() -> bool:
        return await pair.kept() > before

    try:
        async with pair.first.http.post(pair.first.base_url + path, json=body, headers=headers) as response:
            assert response.status == 200, await response.text()
            got = b""
            while not any(name for name, _ in start_of(got)[num_events - 1 :]):
                pace.release()
                with_more = asyncio.create_task(response.content.readany())
                done, _ = await asyncio.wait([with_more], timeout=0.02)
                if not done:
                    pace.release()
                got += await with_more
            if is_lost:
                pair.lose()
            await eventually(is_kept)
    finally:
        pair.first.script.pace = None
    await pair.first.calls.until(lambda: pair.first.calls.num_open == 0)
    events = start_of(got)
    end = next(index for index, (name, _) in enumerate(events, 1) if name and index >= num_events)
    return b"".join(_event(name, data) for name, data in events[:end])


def _event(name: str, data: bytes) -> bytes:
    """An event as it was received: the first ones have no id while their request is not in Redis yet."""
    return (b"id: %b\n" % name.encode() if name else b"") + b"data: %b\n\n" % data


def start_of(data: bytes) -> list[tuple[str, bytes]]:
    return [((match["id"] or b"").decode(), match["data"]) for match in EVENT.finditer(data)]


def normal(data: bytes) -> list[bytes]:
    """The data of all events, without what differs between two requests."""
    found = [each for _, each in events_of(data)]
    return [re.sub(rb'"(id|created)": ?("[^"]*"|\d+)', b"", each) for each in found]


def by_choice(data: bytes) -> tuple[dict[int, list[Any]], Any]:
    """The events of each choice, and the last usage. Choices take turns in any order, and usage so far with them."""
    choices: dict[int, list[Any]] = {}
    *events, last = events_of(data)
    assert last[1] == b"[DONE]"
    usage = None
    for event in [json.loads(each) for _, each in events]:
        usage = event.get("usage")
        for choice in event["choices"]:
            choices.setdefault(choice["index"], []).append(choice)
    return choices, usage
