"""A real Redis for tests, and how tests wait for what happens in it."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, NoReturn, Protocol

import pytest
import redis

from pdserve.base.tasks import service_group
from pdserve.cli.private_redis import PrivateRedis
from tests.support.deadline import DEADLINE_S


class SharedRedis(PrivateRedis):
    """A Redis that one pytest process starts once for its tests, one after the other. None of them may stop it."""

    def __init__(self) -> None:
        super().__init__()
        self._server: subprocess.Popen[bytes] | None = None

    @contextmanager
    def running(self) -> Iterator[SharedRedis]:
        """Runs the server during the block, outside of any event loop: each test has its own."""
        self._directory.mkdir(mode=0o700)
        self._server = subprocess.Popen(self._argv(), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        try:
            self._wait_for_an_answer(self._server)
            yield self
        finally:
            self._server.terminate()
            self._server.wait()
            self._clean_up()

    def _wait_for_an_answer(self, server: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        with redis.Redis(unix_socket_path=str(self._socket)) as connection:
            while True:
                try:
                    connection.ping()
                except redis.ConnectionError:  # There is no socket yet, or it does not accept, or it loads.
                    assert server.poll() is None, f"redis-server ended with {server.returncode}"
                    assert time.monotonic() < deadline, f"did not happen within {DEADLINE_S:g} s: Redis answers"
                    time.sleep(0.01)
                else:
                    return

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Lends the server to one test: empty, without scripts, and with settings that have to stay as they are."""
        with redis.Redis(unix_socket_path=str(self._socket)) as connection:
            connection.flushall()
            connection.script_flush()
            before: Any = connection.config_get()
            yield
            after: Any = connection.config_get()
            changed = {name for name in before if before[name] != after.get(name)}
            assert not changed, f"the test has changed {changed} of the shared Redis: mark it own_redis"

    @property
    def pid(self) -> int | None:
        return None if self._server is None else self._server.pid

    async def start(self) -> NoReturn:
        raise AssertionError("other tests share this Redis: mark a test that starts or stops it with own_redis")

    async def stop(self, *, kill: bool = False) -> NoReturn:
        await self.start()


@pytest.fixture(scope="session")
def shared_redis() -> Iterator[SharedRedis]:
    """The Redis of this process."""
    with SharedRedis().running() as server:
        yield server


@pytest.fixture
async def redis_server(request: pytest.FixtureRequest) -> AsyncIterator[PrivateRedis]:
    """An empty Redis on a Unix socket: the process's, or with the marker `own_redis` one of the test's own.

    `stop`, `start` and `restart` of the test's own lose its data and keep its URL.
    """
    if request.node.get_closest_marker("own_redis"):
        async with PrivateRedis() as server:
            yield server
        return
    shared: SharedRedis = request.getfixturevalue("shared_redis")
    with shared.lent():
        yield shared


@asynccontextmanager
async def running(*services: Awaitable[object]) -> AsyncIterator[None]:
    """Runs the `run()` of components until the block ends, as a service does."""
    async with service_group() as group:
        for number, service in enumerate(services):
            group.start(service, name=f"service-{number}")
        yield


class Watched(Protocol):
    """A component that notifies of its changes."""

    @property
    def version(self) -> int:
        """Increases with every change."""

    async def wait_for_change(self, since: int | None = None) -> int:
        """Returns once the version differs from `since`."""


async def until(watched: Watched, condition: Callable[[], bool]) -> None:
    """Returns once the condition holds, which is checked at each change of `watched`; fails after the deadline."""
    async with asyncio.timeout(DEADLINE_S):
        version = watched.version
        while not condition():
            version = await watched.wait_for_change(version)


async def eventually(condition: Callable[[], Awaitable[bool]], *, timeout_s: float = DEADLINE_S) -> None:
    """Returns once the condition holds, for state without notifications; fails after the deadline."""
    async with asyncio.timeout(timeout_s):
        while not await condition():  # noqa: ASYNC110 (there is no event to wait for)
            await asyncio.sleep(0.01)
