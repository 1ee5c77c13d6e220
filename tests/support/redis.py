"""A real Redis for tests: `from tests.support.redis import redis_server` in a conftest makes the fixture available."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Protocol

import pytest

from pdserve.base.tasks import service_group
from pdserve.cli.private_redis import PrivateRedis

#: Upper bound of a wait; a test that reaches it hangs. On a busy machine, processes may wait for seconds to run.
DEADLINE_S = 60.0


@pytest.fixture
async def redis_server() -> AsyncIterator[PrivateRedis]:
    """A private Redis on a Unix socket; `stop`, `start` and `restart` lose its data and keep its URL."""
    async with PrivateRedis() as server:
        yield server


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
