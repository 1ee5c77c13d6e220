"""A real Redis for tests: `from tests.support.redis import redis_server` in a conftest makes the fixture available."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from pdserve.base.private_redis import PrivateRedis


@pytest.fixture
async def redis_server() -> AsyncIterator[PrivateRedis]:
    """A private Redis on a Unix socket; `stop`, `start` and `restart` lose its data and keep its URL."""
    async with PrivateRedis() as server:
        yield server
