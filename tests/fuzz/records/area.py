"""A router with scripted workers, a publisher of blocks, and Redis with anything in it."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import datetime
from pathlib import Path

from kvtransfer.index.kv_events import KvEventPublisher, PublishPolicy
from pdserve.base.errors import StoreError
from pdserve.base.ids import Epoch, WorkerId
from pdserve.cli.private_redis import PrivateRedis
from pdserve.peers.deaths import requests_of_death
from pdserve.redis.store import Store
from pdserve.worker.serve.last_exit import ExitNote
from router_svc.records.usage import Account, Usage
from tests.fuzz.area import Area, Feeder
from tests.fuzz.records import inputs
from tests.integration.router_svc.conftest import ScriptedCluster, open_cluster
from tests.support.records import block_hashes
from tests.support.redis import eventually, running
from tests.support.tiny_model import NAME, write_model

_PUBLISHER, _EPOCH = WorkerId("publisher"), Epoch(5)
_KEYS = (
    "pd:workers",
    "pd:workers-mark",
    "pd:reqs",
    "pd:kv-workers",
    "pd:kv-head",
    "pd:kv-events",
    "pd:exit:decode-0",
    "pd:death:decode-0:1",
)


class RecordFeeder:
    """Writes to Redis while a router and workers use it."""

    def __init__(self, cluster: ScriptedCluster, store: Store, publisher: KvEventPublisher) -> None:
        self._cluster = cluster
        self._store = store
        self._publisher = publisher
        self._blocks = block_hashes(3)
        self._is_held = False

    async def feed(self, target: str, data: bytes) -> str:
        """Writes, has everybody read, and asks the router for a completion."""
        commands = inputs.decode(data)
        if commands is None:
            return "no commands"
        outcome = "written"
        for command in commands:
            try:
                await self._store.call(*command)
            except StoreError:
                outcome = "refused by Redis"
        await self._read_by_all()
        status, answer = await self._cluster.complete()
        assert status in (200, 502, 503, 504), f"{status} {answer}"
        status, answer = await self._cluster.get(f"/v1/requests/{inputs.REQUEST}/trace")
        assert status in (200, 404, 503), f"{status} {answer}"
        status, _ = await self._cluster.get("/v1/cluster")
        assert status == 200
        status, answer = await self._cluster.get(f"/v1/usage?from={inputs.USAGE_DAY}&to={inputs.USAGE_DAY}")
        assert status in (200, 503), f"{status} {answer}"
        async with self._cluster.http.get(self._cluster.admin_url + "/metrics") as response:
            assert response.status == 200, await response.text()
        await self._delete(commands)
        return outcome

    async def check(self) -> None:
        """The same answer, through the workers that are really there, and an index that follows their blocks."""
        await eventually(self._knows_its_workers)
        status, answer = await self._cluster.complete()
        assert (status, answer["choices"][0]["text"]) == (200, "Hello world."), answer
        self._is_held = not self._is_held
        held = self._blocks if self._is_held else []
        self._publisher.publish(held, [] if held else self._blocks)
        await eventually(self._index_follows)
        await self._cluster.calls.until(lambda: self._cluster.calls.num_open == 0)
        assert self._cluster.router.num_open == 0
        requests = self._cluster.router._request_store
        await eventually(lambda: _is(requests.queued == 0))

    async def _read_by_all(self) -> None:
        router = self._cluster.router
        if await router.cluster.directory._refresh():
            router.cluster.directory._changes.bump()
        await asyncio.sleep(0)
        for worker in self._cluster.workers.values():
            await worker.registrar._beat()
        noon = datetime.fromisoformat(f"{inputs.USAGE_DAY}T12:00Z").timestamp()
        router._usage._pending.add(Account(tenant="t", key_id="k", model="m"), Usage(requests=1), noon)
        await ExitNote(self._store, "decode-0").exchange()
        await requests_of_death(self._store, WorkerId("decode-0"), Epoch(1))
        self._publisher.publish(block_hashes(1, start=9), block_hashes(1, start=9))

    async def _knows_its_workers(self) -> bool:
        cluster = self._cluster.router.cluster
        known = [worker.worker_id for tier in ("prefill", "decode") for worker in cluster.ready(tier)]  # type: ignore[arg-type]
        return sorted(known) == sorted(inputs.WORKERS) and not self._cluster.router.cluster.directory.degraded

    async def _index_follows(self) -> bool:
        mirror = self._cluster.router._mirror
        return not mirror.degraded and mirror.overlap(self._blocks).get(_PUBLISHER, 0) == 3 * self._is_held

    async def _delete(self, commands: list[list[bytes]]) -> None:
        """Removes the stranger's keys; what the cluster itself writes stays as it is now."""
        own = tuple(f"pd:worker:{name}".encode() for name in inputs.WORKERS)
        keys = {command[1] for command in commands} - {key.encode() for key in _KEYS} - set(own)
        for key in keys:
            await self._store.call("DEL", key)


async def _is(condition: bool) -> bool:
    return condition


@asynccontextmanager
async def open_feeder() -> AsyncIterator[Feeder]:
    """Starts everything."""
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        redis = await stack.enter_async_context(PrivateRedis())
        model = write_model(directory / NAME)
        tiers = {"prefill-0": "prefill", "decode-0": "decode"}
        cluster = await stack.enter_async_context(open_cluster(redis, model, tiers))  # type: ignore[arg-type]
        store = await stack.enter_async_context(Store(redis.url))
        policy = PublishPolicy(batch_s=0.001, retry_s=0.01)
        publisher = KvEventPublisher(store, _PUBLISHER, _EPOCH, policy)
        await stack.enter_async_context(running(publisher.run()))
        yield RecordFeeder(cluster, store, publisher)


AREA = Area(
    name="records",
    targets={
        "worker": inputs.worker,
        "request": inputs.request,
        "index": inputs.index,
        "note": inputs.note,
        "usage": inputs.usage,
    },
    open=open_feeder,
)
