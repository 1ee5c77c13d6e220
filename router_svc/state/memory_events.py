"""Events of records in memory, for a store that serves a single router."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict

from router_svc.state.state_store import EVENTS_TTL_S, MAX_EVENT_BYTES, EventBatch

#: Records whose events are in memory, and the bytes of all events. Beyond this, the oldest events are dropped.
_MAX_LOGS = 256
_MAX_BYTES = 256 << 20


class _Log:
    """The events of one record."""

    def __init__(self) -> None:
        self.batches: list[EventBatch] = []
        self.num_bytes = 0
        self.appended_at = time.monotonic()
        self.more = asyncio.Event()


class MemoryEvents:
    """The events of all records. Belongs to the event loop."""

    def __init__(self) -> None:
        self._logs: OrderedDict[str, _Log] = OrderedDict()
        self._num_bytes = 0

    def append(self, key: str, batch: EventBatch) -> None:
        """Adds events, but for those that are there already."""
        log = self._logs.setdefault(key, _Log())
        self._logs.move_to_end(key)
        new = batch.behind(log.batches[-1].last if log.batches else -1)
        size = sum(map(len, new.events))
        if not new.events or log.num_bytes + size > MAX_EVENT_BYTES:
            return
        log.batches.append(new)
        log.num_bytes += size
        self._num_bytes += size
        log.appended_at = time.monotonic()
        log.more.set()
        log.more = asyncio.Event()
        self.forget_old()

    async def behind(self, key: str, after: int, *, wait_s: float) -> list[EventBatch]:
        """Events with larger numbers than `after`. Waits for one for at most this time."""
        log = self._logs.setdefault(key, _Log())
        if not log.batches or log.batches[-1].last <= after:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await log.more.wait()
        return [batch.behind(after) for batch in log.batches if batch.last > after]

    def drop(self, key: str) -> None:
        """Forgets the events of a record."""
        log = self._logs.pop(key, None)
        if log is not None:
            self._num_bytes -= log.num_bytes

    def forget_old(self) -> None:
        """Forgets events that are too old, and the oldest of too many."""
        too_old = time.monotonic() - EVENTS_TTL_S
        while self._logs:
            key, log = next(iter(self._logs.items()))
            if len(self._logs) <= _MAX_LOGS and self._num_bytes <= _MAX_BYTES and log.appended_at > too_old:
                return
            self.drop(key)
