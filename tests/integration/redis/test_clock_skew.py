"""The skew is the difference between this clock and that of Redis, and Redis may be away."""

from __future__ import annotations

import asyncio
import math
import time

import pytest

from pdserve.cli.private_redis import PrivateRedis
from pdserve.redis.clock_skew import ClockSkew
from pdserve.redis.store import Store
from tests.support.redis import eventually


async def test_a_clock_that_is_ahead_has_a_positive_skew(worker_store: Store) -> None:
    skew = ClockSkew(worker_store, clock=lambda: time.time() + 100)
    assert math.isnan(skew.seconds)
    await skew.measure()
    # Bounded by the store's deadline, not by the speed of this machine.
    assert abs(skew.seconds - 100) < 1


@pytest.mark.own_redis
async def test_measuring_goes_on_after_redis_was_away(worker_store: Store, redis_server: PrivateRedis) -> None:
    skew = ClockSkew(worker_store, interval_s=0.01)
    await redis_server.stop()
    measuring = asyncio.create_task(skew.run())

    async def is_measured() -> bool:
        return not math.isnan(skew.seconds)

    async def is_lost() -> bool:
        return not worker_store.available

    await eventually(is_lost)
    assert math.isnan(skew.seconds)
    await redis_server.start()
    await eventually(is_measured)
    measuring.cancel()
    await asyncio.gather(measuring, return_exceptions=True)
