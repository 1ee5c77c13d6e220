"""Heartbeats are limited in rate, without a real Redis or a real clock."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import cast

import pytest

from pdserve.peers.registry import Registrar, WorkerRecord
from pdserve.redis.store import Store
from tests.support.records import worker_record
from tests.support.redis import running

PAUSE_S = 0.05


class NullStore:
    """A store that accepts every script."""

    def key(self, name: str) -> str:
        return name

    async def script(self, *_: object, **__: object) -> bytes:
        return b""


@pytest.mark.virtual_time
async def test_repeatedly_emptied_queues_cause_heartbeats_at_a_bounded_rate() -> None:
    loop, times, enough = asyncio.get_running_loop(), list[float](), asyncio.Event()

    def current() -> WorkerRecord:
        times.append(loop.time())
        if len(times) == 4:
            enough.set()
        # Emptied again at once, so that only the pause limits the rate.
        loop.call_soon(registrar.announce_empty_queue)
        return worker_record()

    registrar = Registrar(cast(Store, NullStore()), current, heartbeat_s=3600, pause_s=PAUSE_S)
    async with running(registrar.run()):
        await enough.wait()
    assert [later - earlier for earlier, later in pairwise(times[:4])] == pytest.approx([PAUSE_S] * 3)
