"""The difference between this process's clock and that of Redis, which all processes of a cluster can compare."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable

from pdserve.base.errors import StoreError
from pdserve.redis.store import Store, as_bytes, as_list


class ClockSkew:
    """Measures the skew again and again while `run` runs.

    The clock of Redis is a reference for comparisons only: it may be wrong itself. The error of a measurement is at
    most half the time that Redis took to answer.
    """

    def __init__(self, store: Store, *, interval_s: float = 15.0, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._interval_s = interval_s
        self._clock = clock
        #: Seconds by which this clock is ahead of that of Redis; NaN before the first measurement.
        self.seconds = math.nan

    async def run(self) -> None:
        """Measures until cancelled. The last value stays while Redis is away."""
        while True:
            with contextlib.suppress(StoreError):  # The store logs outages.
                await self.measure()
            await asyncio.sleep(self._interval_s)

    async def measure(self) -> None:
        """Measures once. Raises `StoreError`."""
        before = self._clock()
        seconds, microseconds = (int(as_bytes(item)) for item in as_list(await self._store.call("TIME")))
        self.seconds = (before + self._clock()) / 2 - (seconds + microseconds / 1e6)
