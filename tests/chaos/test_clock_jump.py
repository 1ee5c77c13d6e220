"""Wall clocks that jump while requests run: those of real processes, by libfaketime (`make test-deploy`)."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from pdserve.cli.free_ports import free_port
from pdserve.cli.private_redis import find_redis_server, server_argv, wait_until_ready
from pdserve.redis.store import Store
from tests.support.default_model import model_for_depth
from tests.support.own_task import in_own_task
from tests.support.redis import eventually
from tests.support.services import READY_S, RouterClient, service, text_of

pytestmark = pytest.mark.deploy

_LIBRARIES = sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))
_WORKERS = {"prefill-0": "prefill", "decode-0": "decode"}
_PROCESSES = ("redis", "router", *_WORKERS)
_HOUR_S = 3600
_PROMPT = list(range(1000, 1300))


class Clocks:
    """The wall clocks of processes by name. Steady clocks stay as they are."""

    def __init__(self, directory: Path) -> None:
        self._files = {name: directory / f"{name}.clock" for name in _PROCESSES}
        for file in self._files.values():
            file.write_text("+0", encoding="ascii")

    def environment(self, name: str) -> dict[str, str]:
        """Variables with which a process has this clock."""
        return {
            "LD_PRELOAD": str(_LIBRARIES[0]),
            "FAKETIME_TIMESTAMP_FILE": str(self._files[name]),
            "FAKETIME_CACHE_DURATION": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }

    def set(self, name: str, offset_s: int) -> None:
        """The clock is so much ahead, within a second."""
        new = self._files[name].with_suffix(".new")
        new.write_text(f"{offset_s:+d}", encoding="ascii")
        new.replace(self._files[name])  # Never read half written.


@dataclass(frozen=True, slots=True, kw_only=True)
class Clocked:
    """A cluster of four processes, each with a wall clock of its own."""

    router: RouterClient
    clocks: Clocks
    redis_url: str
    #: Where each process says what time it is, but for Redis.
    urls: dict[str, str]

    async def offset_s(self, name: str) -> float:
        """By how much a process is ahead, as it says itself."""
        if name == "redis":
            async with Store(self.redis_url) as store:
                found = await store.call("TIME")
            assert isinstance(found, list)
            return float(found[0]) - time.time()  # type: ignore[arg-type]
        async with self.router.http.get(f"{self.urls[name]}/livez") as response:
            date = response.headers["Date"]
        return time.mktime(time.strptime(date, "%a, %d %b %Y %H:%M:%S GMT")) - time.mktime(time.gmtime())

    async def jump(self, name: str, offset_s: int) -> None:
        """Returns once the process has the new time."""

        async def is_there() -> bool:
            return abs(await self.offset_s(name) - offset_s) < 60

        self.clocks.set(name, offset_s)
        await eventually(is_there)

    async def stream(self, *jumping: str) -> str:
        """The text of a stream during which clocks jump forward and back."""

        async def jump(_: str) -> None:
            for offset_s in (_HOUR_S, -_HOUR_S, 0):
                for name in jumping:
                    await self.jump(name, offset_s)

        return text_of(await self.router.stream(prompt=_PROMPT, max_tokens=1000, meanwhile=jump))


@asynccontextmanager
async def _redis(clocks: Clocks, directory: Path) -> AsyncIterator[str]:
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        *server_argv(find_redis_server(), directory=directory, port=port),
        env={**os.environ, **clocks.environment("redis")},
        stdout=asyncio.subprocess.DEVNULL,
    )
    try:
        await wait_until_ready(f"redis://127.0.0.1:{port}", has_ended=lambda: process.returncode is not None)
        yield f"redis://127.0.0.1:{port}"
    finally:
        process.terminate()
        await process.wait()


@asynccontextmanager
async def clocked(directory: Path, *, secret: str) -> AsyncIterator[Clocked]:
    """`secret`: of the cluster; empty: it has none."""
    clocks, ports = Clocks(directory), {name: free_port() for name in _PROCESSES}
    async with AsyncExitStack() as stack:
        redis_url = await stack.enter_async_context(_redis(clocks, directory))
        shared = {"model": model_for_depth(directory), "redis_url": redis_url, "host": "127.0.0.1"}
        flags = {"worker_return_timeout_s": 30, "local_prefill_threshold": 0}
        sizes = {"threads": 1, "kv_cache_memory": "128MiB"}
        for name, module in {
            "router": "router_svc",
            **{name: f"{tier}_svc" for name, tier in _WORKERS.items()},
        }.items():
            own = {"port": ports[name], **flags} if name == "router" else {"http_port": ports[name], **sizes}
            await stack.enter_async_context(
                service(
                    *(directory / f"{name}.log", module),
                    environment={**clocks.environment(name), **({"PDSERVE_CLUSTER_SECRET": secret} if secret else {})},
                    **shared,
                    **own,
                    **({} if name == "router" else {"worker_id": name}),
                )
            )
        http = await stack.enter_async_context(aiohttp.ClientSession())
        urls = {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}
        cluster = Clocked(router=RouterClient(http, urls["router"]), clocks=clocks, redis_url=redis_url, urls=urls)
        await cluster.router.until_ready(*_WORKERS)
        yield cluster


@pytest.fixture(autouse=True)
def _library() -> Iterator[None]:
    """Skips the test without the library, and removes the shared memory that it leaves behind killed processes."""
    if not _LIBRARIES:
        pytest.skip("needs libfaketime (Debian's package faketime)")
    before = set(_shared_memory())
    yield
    for path in set(_shared_memory()) - before:
        path.unlink(missing_ok=True)


def _shared_memory() -> Iterator[Path]:
    return Path("/dev/shm").glob("*faketime_*")


async def test_clocks_that_jump_change_no_token_and_leave_nothing(tmp_path: Path) -> None:
    """An hour forward, Redis forgets all that expires."""
    async with in_own_task(clocked(tmp_path, secret="")) as cluster:
        undisturbed = await cluster.stream()
        for names in (["redis"], ["router"], list(_WORKERS)):
            assert await cluster.stream(*names) == undisturbed
        await cluster.router.until_ready(*_WORKERS)
        await cluster.router.until_idle(*_WORKERS)


async def test_peers_whose_clocks_differ_too_much_refuse_each_other_until_they_agree(tmp_path: Path) -> None:
    """With a secret, messages that are more than minutes old count as repeated by a stranger."""
    async with in_own_task(clocked(tmp_path, secret=secrets.token_hex(32))) as cluster:
        undisturbed = await cluster.stream()
        await cluster.jump("decode-0", _HOUR_S)

        async def is_refused() -> bool:
            return "decode-0" not in await cluster.router.workers()

        await eventually(is_refused, timeout_s=READY_S)
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(cluster.stream())
            await cluster.jump("decode-0", 0)
        assert waiting.result() == undisturbed
        assert await cluster.router.metric("pdserve_peer_messages_refused_total") > 0
        await cluster.router.until_idle(*_WORKERS)
