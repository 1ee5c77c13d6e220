"""A hanging step loop fails the liveness probe; busy and idle ones do not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp
import pytest
from prometheus_client import CollectorRegistry

from pdserve.base.tasks import service_group
from pdserve.net.admin import Health, bound_socket, serve_admin
from pdserve.worker.serve.stall_watch import HUNG_FACTOR, INTERVAL_S, watch_stalls

TIMEOUT_S = 300.0
#: The longest step of the watched loop so far.
LONGEST_STEP_S = 4.0


@dataclass
class Loop:
    """A step loop without progress for `stalled_s`."""

    stalled_s: float = 0.0
    position: str = "forward (decoder.py:88)"


@dataclass
class Watched:
    """A watched loop, and what a probe of it finds."""

    address: str
    loop: Loop = field(default_factory=Loop)
    #: Readiness at each change that was published.
    published: list[bool] = field(default_factory=list)

    async def get(self, path: str, *, stalled_s: float) -> tuple[int, str | None]:
        """Status and reason, some time after the loop's age has become `stalled_s`."""
        self.loop.stalled_s = stalled_s
        await asyncio.sleep(2 * INTERVAL_S)
        async with aiohttp.ClientSession() as session, session.get(f"http://{self.address}{path}") as response:
            return response.status, (await response.json())["reason"]


@asynccontextmanager
async def watched() -> AsyncIterator[Watched]:
    health = Health(not_ready=None)
    listener = bound_socket("127.0.0.1", 0, flag="--http-port")
    async with serve_admin(health, CollectorRegistry(), listener) as address, service_group() as tasks:
        it = Watched(address)

        async def publish() -> None:
            it.published.append(health.is_ready)

        watch = watch_stalls(
            it.loop, health, timeout_s=TIMEOUT_S, on_change=publish, longest_step_s=lambda: LONGEST_STEP_S
        )
        tasks.start(watch, name="stalls")
        yield it


@pytest.mark.virtual_time
async def test_a_step_that_does_not_end_fails_the_liveness_probe_with_the_reason() -> None:
    async with watched() as it:
        status, reason = await it.get("/livez", stalled_s=301)
        assert status == 503
        assert reason is not None
        assert "no progress for 301 s, and the limit is 300 s" in reason
        assert "--stall-timeout-s" in reason
        assert (await it.get("/readyz", stalled_s=400))[0] == 503
        assert it.published == [False]


@pytest.mark.virtual_time
async def test_a_step_many_times_longer_than_any_before_makes_the_worker_not_ready_and_leaves_it_alive() -> None:
    async with watched() as it:
        assert await it.get("/readyz", stalled_s=HUNG_FACTOR * LONGEST_STEP_S - 1) == (200, None)
        status, reason = await it.get("/readyz", stalled_s=HUNG_FACTOR * LONGEST_STEP_S)
        assert status == 503
        assert reason is not None
        assert "no progress for 20 s" in reason
        assert (await it.get("/livez", stalled_s=299))[0] == 200
        assert await it.get("/readyz", stalled_s=0) == (200, None)
        assert it.published == [False, True]


@pytest.mark.virtual_time
async def test_a_worker_that_idles_for_hours_is_alive() -> None:
    async with watched() as it:
        await asyncio.sleep(36_000)
        assert await it.get("/livez", stalled_s=0) == (200, None)


@pytest.mark.virtual_time
async def test_a_step_that_ends_after_all_makes_the_worker_ready_again() -> None:
    async with watched() as it:
        assert (await it.get("/livez", stalled_s=500))[0] == 503
        assert await it.get("/readyz", stalled_s=0.1) == (200, None)
        assert it.published == [False, True]
