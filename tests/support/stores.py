"""Fixtures for tests that use Redis: a store for each side, and a check for leaked sockets and tasks."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator

import pytest

from pdserve.cli.private_redis import PrivateRedis
from pdserve.redis.store import Store


def _open_sockets() -> set[str]:
    links = []
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        except FileNotFoundError:  # the descriptor that listed the directory
            continue
    return {link for link in links if link.startswith("socket:")}


@pytest.fixture(autouse=True)
async def nothing_left_behind() -> AsyncIterator[None]:
    """Checks that a test leaves no sockets and no tasks."""
    sockets, tasks = _open_sockets(), asyncio.all_tasks()
    yield
    await asyncio.sleep(0)  # a closed transport gives up its socket in the loop's next round
    assert _open_sockets() <= sockets
    assert asyncio.all_tasks() <= tasks | {asyncio.current_task()}


@pytest.fixture
async def worker_store(redis_server: PrivateRedis) -> AsyncIterator[Store]:
    """The store of a worker process."""
    async with Store(redis_server.url) as store:
        yield store


@pytest.fixture
async def router_store(redis_server: PrivateRedis) -> AsyncIterator[Store]:
    """The store of a router process."""
    async with Store(redis_server.url) as store:
        yield store
