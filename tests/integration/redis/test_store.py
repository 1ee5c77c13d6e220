"""The store against a real Redis: calls have deadlines, fail with one type of error and reconnect by themselves."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from pdserve.base.errors import StoreError
from pdserve.cli.free_ports import free_port
from pdserve.cli.private_redis import PrivateRedis
from pdserve.redis.store import Reply, Store, as_bytes
from tests.support.redis import eventually


@pytest.mark.own_redis
async def test_a_store_opens_without_redis_and_finds_it_later(redis_server: PrivateRedis) -> None:
    await redis_server.stop()
    reasons: list[str | None] = []
    async with Store(redis_server.url, on_change=reasons.append) as store:
        assert not store.available
        assert store.unavailable_since is not None
        with pytest.raises(StoreError, match="cannot be used"):
            await store.call("GET", "key")
        await redis_server.start()
        assert await store.call("GET", "key") is None
        assert store.available
        assert store.unavailable_since is None
    assert reasons == [f"Redis at {store.address} cannot be used", None]


@pytest.mark.own_redis
async def test_a_restart_is_noticed_even_between_two_calls(redis_server: PrivateRedis) -> None:
    """The first call fails rather than silently reconnect, since callers rely on stored data."""
    async with Store(redis_server.url) as store:
        await store.call("SET", "key", "value")
        before = store.outages
        await redis_server.restart()
        with pytest.raises(StoreError):
            await store.call("GET", "key")
        assert store.outages == before + 1
        assert await store.call("GET", "key") is None


@pytest.mark.own_redis
async def test_a_hanging_redis_is_an_error_after_the_timeout(redis_server: PrivateRedis) -> None:
    async with Store(redis_server.url, timeout_s=0.2) as store:
        assert redis_server.pid is not None
        os.kill(redis_server.pid, signal.SIGSTOP)
        try:
            with pytest.raises(StoreError, match=r"no answer within 0\.2 s"):
                await store.call("PING")
        finally:
            os.kill(redis_server.pid, signal.SIGCONT)
        assert await store.call("PING") == b"PONG"


async def test_a_refused_command_raises_store_error_without_counting_an_outage(redis_server: PrivateRedis) -> None:
    async with Store(redis_server.url) as store:
        with pytest.raises(StoreError, match="WRONGTYPE"):
            await store.pipeline([["SET", "key", "value"], ["LPUSH", "key", "x"], ["SET", "other", "value"]])
        assert store.available
        assert store.outages == 0
        assert await store.call("GET", "other") == b"value"


async def test_a_full_redis_refuses_writes_instead_of_evicting() -> None:
    async with PrivateRedis(memory_bytes=1_500_000) as server, Store(server.url) as store:
        await store.call("SET", "kept", "value")
        with pytest.raises(StoreError, match="maxmemory"):
            for number in range(100):
                await store.call("SET", f"large-{number}", b"x" * 100_000)
        assert await store.call("GET", "kept") == b"value"


async def test_the_late_reply_to_a_cancelled_call_never_answers_the_next_one(redis_server: PrivateRedis) -> None:
    async with Store(redis_server.url) as store, Store(redis_server.url) as other:
        await store.call("SET", "key", "value")
        waiting = asyncio.create_task(store.call("BLPOP", "queue", 60, block_s=60))
        await eventually(lambda: _has_blocked_client(other))
        await _cancel(waiting)
        await other.call("RPUSH", "queue", "late")
        assert await store.call("GET", "key") == b"value"
        assert store.available


async def test_a_call_that_is_cancelled_while_it_connects_does_not_disturb_the_next_one(
    redis_server: PrivateRedis,
) -> None:
    store = Store(redis_server.url)
    connecting = asyncio.create_task(store.call("SET", "key", "value"))
    await asyncio.sleep(0)  # The task starts and waits for its connection.
    await _cancel(connecting)
    assert await store.call("GET", "key") is None
    assert store.available
    await store.close()


async def test_concurrent_calls_get_their_own_replies(redis_server: PrivateRedis) -> None:
    async with Store(redis_server.url, timeout_s=10) as store:
        await asyncio.gather(*(store.call("SET", f"key-{number}", number) for number in range(20)))
        answers = await asyncio.gather(*(store.call("GET", f"key-{number}") for number in range(20)))
        assert answers == [str(number).encode() for number in range(20)]


@pytest.mark.own_redis
async def test_after_one_failure_all_old_connections_are_closed(redis_server: PrivateRedis) -> None:
    async with Store(redis_server.url, timeout_s=10) as store:
        await asyncio.gather(*(store.call("BLPOP", "queue", "0.01") for _ in range(4)))
        await redis_server.restart()
        with pytest.raises(StoreError):
            await store.call("PING")
        assert [await store.call("PING") for _ in range(4)] == [b"PONG"] * 4


async def test_a_closed_store_refuses(redis_server: PrivateRedis) -> None:
    async with Store(redis_server.url) as store:
        await store.call("PING")
    with pytest.raises(StoreError, match="closed"):
        await store.call("PING")


@pytest.mark.own_redis
async def test_a_private_redis_on_tcp_restarts_on_its_port_and_leaves_no_directory() -> None:
    async with PrivateRedis(port=free_port()) as server, Store(server.url) as store:
        url = server.url
        directory = await store.call("CONFIG", "GET", "dir")
        await server.restart()
        assert server.url == url
        with pytest.raises(StoreError):
            await store.call("PING")
        assert await store.call("PING") == b"PONG"
    assert isinstance(directory, list)
    assert isinstance(directory[1], bytes)
    assert not await asyncio.to_thread(os.path.exists, directory[1])


async def _cancel(task: asyncio.Task[Reply]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def _has_blocked_client(store: Store) -> bool:
    return b"blocked_clients:1\r\n" in as_bytes(await store.call("INFO", "clients"))
