"""What a killed router leaves in the Redis that it shares with another one: two processes, `kill -9`, and real time.

It takes the 60 s of a lease, so only the full depth (`PDSERVE_TEST_DEPTH=full`) runs it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from pdserve.cli.free_ports import free_port
from pdserve.cli.private_redis import PrivateRedis
from pdserve.redis.store import Store
from tests.integration.router_svc.fake_workers import fake_worker
from tests.integration.router_svc.script import CallLog, Script
from tests.support.depth import IS_FULL
from tests.support.own_task import in_own_task
from tests.support.redis import eventually
from tests.support.tiny_model import NAME

pytestmark = [
    pytest.mark.skipif(not IS_FULL, reason="a lease takes 60 s: `make test-all ARGS=killed-router` runs it"),
    pytest.mark.timeout(240),
]

#: That of a reservation, and time for a busy machine.
_LEASE_S = 60.0
_GRACE_S = 60.0
_LIMITS = {"parallel": 2, "tokens_per_minute": 400, "budget": 100_000, "budget_period": "total"}
_PROMPT_TOKENS = 9


class Routers:
    """Two routers of one cluster, as clients see them."""

    def __init__(self, http: aiohttp.ClientSession, processes: list[tuple[str, asyncio.subprocess.Process]]) -> None:
        self.http = http
        self.urls = [url for url, _ in processes]
        self.processes = [process for _, process in processes]

    async def is_ready(self, number: int) -> bool:
        assert self.processes[number].returncode is None, "the router has ended"
        with suppress(aiohttp.ClientConnectionError):
            async with self.http.get(f"{self.urls[number]}/readyz") as response:
                return response.status == 200
        return False

    async def complete(self, number: int, key: str, max_tokens: int = 50) -> tuple[int, dict[str, Any]]:
        """Status and JSON of a completion."""
        body = {"model": NAME, "prompt": "Say hello", "max_tokens": max_tokens}
        headers = {"Authorization": f"Bearer {key}"}
        async with self.http.post(f"{self.urls[number]}/v1/completions", json=body, headers=headers) as response:
            return response.status, await response.json()


@asynccontextmanager
async def router_process(model_dir: Path, redis: PrivateRedis, keys: Path) -> AsyncIterator[Any]:
    port = free_port()
    flags = {"model": model_dir, "redis-url": redis.url, "port": port, "api-keys-file": keys, "host": "127.0.0.1"}
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    with (keys.parent / f"router-{port}.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "router_svc", *words, "--local-prefill-threshold", "0", stdout=log, stderr=log
        )
    try:
        yield f"http://127.0.0.1:{port}", process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@asynccontextmanager
async def two_routers(redis: PrivateRedis, model_dir: Path, directory: Path) -> AsyncIterator[tuple[Routers, CallLog]]:
    keys = [{"id": name, "sha256": hashlib.sha256(name.encode()).hexdigest()} | _LIMITS for name in ("a", "b")]
    path = directory / "keys.json"
    path.write_text(json.dumps({"keys": keys}), encoding="utf-8")
    calls = CallLog(Script())
    async with AsyncExitStack() as stack:
        for tier in ("prefill", "decode"):
            await stack.enter_async_context(fake_worker(calls, tier, f"{tier}-0", redis.url))
        processes = [await stack.enter_async_context(router_process(model_dir, redis, path)) for _ in range(2)]
        routers = Routers(await stack.enter_async_context(aiohttp.ClientSession()), processes)
        for number in range(2):
            await eventually(lambda number=number: routers.is_ready(number))  # type: ignore[misc]
        yield routers, calls


@pytest.fixture
async def cluster(
    redis_server: PrivateRedis, model_dir: Path, tmp_path: Path
) -> AsyncIterator[tuple[Routers, CallLog]]:
    async with in_own_task(two_routers(redis_server, model_dir, tmp_path)) as opened:
        yield opened


async def test_what_a_killed_router_had_reserved_comes_back_and_others_pay_nothing(
    cluster: tuple[Routers, CallLog], redis_server: PrivateRedis
) -> None:
    """Fails if leases do not end, or if their end is charged, to this key or to another one."""
    routers, calls = cluster
    loop = asyncio.get_running_loop()

    async def lost() -> None:
        with suppress(aiohttp.ClientError):
            await routers.complete(0, "a", max_tokens=100)

    async with Store(redis_server.url) as store, asyncio.TaskGroup() as tasks:

        async def has(key: str, *, tokens: int, requests: int) -> bool:
            """Whether the key has used or reserved that many tokens of its budget, in that many open requests."""
            used = await store.call("HGET", store.key(f"limits:{key}"), "b")
            return (used, await store.call("ZCARD", store.key(f"leases:{key}"))) == (str(tokens).encode(), requests)

        status, answer = await routers.complete(0, "b")
        assert status == 200
        paid = answer["usage"]["total_tokens"]
        held = calls.script.pace = asyncio.Semaphore(0)
        for _ in range(2):
            tasks.create_task(lost())

        async def are_held() -> bool:
            return len(held._waiters or ()) == 2

        await eventually(are_held)
        calls.script.pace = None
        assert await has("a", tokens=2 * (_PROMPT_TOKENS + 100), requests=2)
        assert (await routers.complete(1, "a"))[0] == 429
        assert (await routers.complete(1, "b"))[0] == 200

        routers.processes[0].kill()
        killed_at = loop.time()
        assert (await routers.complete(1, "a"))[0] == 429
        while (status := (await routers.complete(1, "a"))[0]) == 429:
            assert loop.time() < killed_at + _LEASE_S + _GRACE_S, "the leases do not end"
            await asyncio.sleep(1)
        assert status == 200
        await eventually(lambda: has("a", tokens=paid, requests=0))
        assert await has("b", tokens=2 * paid, requests=0)
