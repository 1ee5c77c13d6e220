"""The memory of Redis, for metrics: a full one refuses writes, and with them usage, limits and workers' records."""

from __future__ import annotations

import asyncio

from pdserve.base.errors import StoreError
from pdserve.observe.facts.redis import parse_info
from pdserve.observe.metrics import GaugeSource
from pdserve.redis.store import Store, as_bytes


class RedisMemory:
    """Asks Redis again and again while `run` runs."""

    def __init__(self, store: Store, *, interval_s: float = 30.0) -> None:
        self._store = store
        self._interval_s = interval_s
        #: Bytes; None while Redis is away or does not allow `INFO`, and where it has no limit.
        self.used_bytes: int | None = None
        self.max_bytes: int | None = None

    def gauges(self) -> tuple[GaugeSource, ...]:
        """For the router's metrics."""
        return (
            GaugeSource(name="redis_memory_used_bytes", text="Memory that Redis uses", value=lambda: self.used_bytes),
            GaugeSource(
                name="redis_memory_max_bytes",
                text="Memory that Redis may use before it refuses writes",
                value=lambda: self.max_bytes,
            ),
        )

    async def run(self) -> None:
        """Asks until cancelled."""
        while True:
            await self.measure()
            await asyncio.sleep(self._interval_s)

    async def measure(self) -> None:
        """Asks once. Without an answer the numbers become None: old ones would hide that nothing is known."""
        try:
            info = parse_info(as_bytes(await self._store.call("INFO", "memory")))
            used, limit = int(info.get("used_memory", "0")), int(info.get("maxmemory", "0"))
        except (StoreError, ValueError):
            used = limit = 0
        self.used_bytes, self.max_bytes = used or None, limit or None


class StateMemory(RedisMemory):
    """The memory of the Redis of stored responses. A full one refuses new ones."""

    def gauges(self) -> tuple[GaugeSource, ...]:
        """For the router's metrics."""
        return (
            GaugeSource(
                name="state_memory_used_bytes",
                text="Memory that the Redis of stored responses uses",
                value=lambda: self.used_bytes,
            ),
            GaugeSource(
                name="state_memory_max_bytes",
                text="Memory that the Redis of stored responses may use before it refuses new ones",
                value=lambda: self.max_bytes,
            ),
        )
