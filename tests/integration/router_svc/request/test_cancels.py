"""Cancellation across routers: wishes in Redis, which strangers and copies cannot make."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from pdserve.base.errors import Cancelled, StoreError
from pdserve.base.ids import RequestId
from pdserve.base.tasks import service_group
from pdserve.cli.private_redis import PrivateRedis
from pdserve.peers.secret import ClusterSecret
from pdserve.redis.store import Store, as_list
from router_svc.request.cancels import KEY, Cancels
from router_svc.request.open_requests import OpenRequests
from router_svc.routing.timeouts import TimeoutLimits
from tests.support.own_task import in_own_task

ID = RequestId("cmpl-1")
SECRET = ClusterSecret((b"a secret of this cluster",))


@asynccontextmanager
async def two_routers(
    redis: PrivateRedis, *secrets: ClusterSecret | None
) -> AsyncIterator[tuple[Cancels, OpenRequests, Store]]:
    """The first has no requests; those of the second are yielded, while it follows the wishes."""
    async with Store(redis.url) as store, service_group() as group:
        requests = OpenRequests(TimeoutLimits())
        second = Cancels(requests, store, secrets[1])
        group.start(second.run(), name="second")
        yield Cancels(OpenRequests(TimeoutLimits()), store, secrets[0]), requests, store


async def running(requests: OpenRequests, tenant: str, started: asyncio.Event) -> str:
    try:
        async with requests.entered(ID, tenant, 600.0):
            started.set()
            await asyncio.Event().wait()
    except Cancelled:
        return "cancelled"
    return "done"


@pytest.mark.parametrize("secret", [None, SECRET])
async def test_a_request_is_cancelled_through_a_router_that_does_not_have_it(
    redis_server: PrivateRedis, secret: ClusterSecret | None
) -> None:
    async with in_own_task(two_routers(redis_server, secret, secret)) as (first, requests, store):
        started = asyncio.Event()
        request = asyncio.create_task(running(requests, "mine", started))
        await started.wait()
        assert not await first.cancel(ID, "other")
        # The second router may not follow yet, as after its start.
        while not await first.cancel("1", "mine"):
            pass
        assert await request == "cancelled"
        assert not await first.cancel(ID, "mine")
        # What is left in Redis expires.
        for key in as_list(await store.call("KEYS", store.key("cancel*"))):
            assert isinstance(key, bytes)
            ttl_ms = await store.call("PTTL", key)
            assert isinstance(ttl_ms, int)
            assert ttl_ms > 0


async def test_what_strangers_and_copies_wish_is_ignored(redis_server: PrivateRedis) -> None:
    async with in_own_task(two_routers(redis_server, None, SECRET)) as (stranger, requests, store):
        started = asyncio.Event()
        request = asyncio.create_task(running(requests, "mine", started))
        await started.wait()
        friend = Cancels(OpenRequests(TimeoutLimits()), store, SECRET)
        while not await friend.cancel(ID, "mine"):
            pass
        await request
        entries = as_list(await store.call("XRANGE", store.key(KEY), "-", "+"))
        copy = as_list(as_list(entries[-1])[1])
        started.clear()
        request = asyncio.create_task(running(requests, "mine", started))
        await started.wait()
        await store.call("XADD", store.key(KEY), "*", *copy)  # type: ignore[arg-type]
        for wrong in (["wish", "{", "mac", ""], ["wish", "{}", "mac", "x"], ["x", "y"]):
            await store.call("XADD", store.key(KEY), "*", *wrong)
        # An answer to this later one proves that the earlier ones were read.
        assert not await stranger.cancel(ID, "mine")
        assert not request.done()
        assert await friend.cancel(ID, "mine")
        assert await request == "cancelled"


async def test_without_redis_an_unknown_id_is_not_called_unknown() -> None:
    async with Store("redis://127.0.0.1:1") as store:
        with pytest.raises(StoreError):
            await Cancels(OpenRequests(TimeoutLimits()), store).cancel(ID, None)
