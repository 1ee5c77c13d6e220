"""The limiter's own task: what it does in which order, with a Redis that only answers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from pdserve.redis.store import Argument, Reply, Store
from router_svc.request.client import Client
from router_svc.request.limit_scripts import RENEW, RESERVE, SETTLE
from router_svc.request.limiter import Limiter
from router_svc.request.limits import Limits
from tests.support.redis import running

KEY = Client(id="k", limits=Limits(parallel=100))
_LEASE_S = 60.0
#: Time after which no more requests end.
_BUSY_S = 100.0


class Answering(Store):
    """Grants what is asked for, and takes a second for settlements, during which another request ends."""

    def __init__(self) -> None:
        super().__init__("redis://127.0.0.1:1")
        self.limiter = Limiter(self, lease_s=_LEASE_S)
        self.renewed = asyncio.Event()

    async def pipeline(self, commands: Sequence[Sequence[Argument]], *, block_s: float = 0.0) -> list[Reply]:
        match commands[0][1]:
            case script if script == RESERVE:
                return [[b"", b"0", b"0", b"0", b"0", b"0"]]
            case script if script == SETTLE:
                await asyncio.sleep(1)
                if asyncio.get_running_loop().time() < _BUSY_S:
                    self.limiter.settle(await self.limiter.reserve(KEY, 1), 1)
            case script if script == RENEW:
                self.renewed.set()
        return [1 for _ in commands]


@pytest.mark.virtual_time
async def test_leases_are_renewed_in_time_also_while_requests_end_all_the_time() -> None:
    """Fails if leases are renewed only when nothing is due: a busy router would lose those of its long requests."""
    store = Answering()
    limiter, loop = store.limiter, asyncio.get_running_loop()
    await limiter.reserve(KEY, 1)
    limiter.settle(await limiter.reserve(KEY, 1), 1)
    async with running(limiter.run()):
        await store.renewed.wait()
        assert loop.time() < _LEASE_S / 2
