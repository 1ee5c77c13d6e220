"""The events of one background response, for all who follow it on this router."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from router_svc.state.state_store import MAX_EVENT_BYTES, EventBatch, StateStore

#: Events are collected for this long before other routers get them.
_INTERVAL_S = 0.2
_SEPARATOR = b"\n\n"
_LAST = tuple(b"event: response.%b\n" % kind for kind in (b"completed", b"incomplete", b"failed"))


def is_last(event: bytes) -> bool:
    """Whether a response has no event after this one."""
    return event.startswith(_LAST)


class ResponseEvents:
    """Events with numbers from 0. Belongs to the event loop."""

    def __init__(self) -> None:
        self._events: list[bytes] = []
        self._more = asyncio.Event()
        self._is_closed = False
        self._num_written = 0
        self._bytes_written = 0

    def publish(self, events: bytes) -> None:
        """Adds events, each of which ends with an empty line."""
        self._events += events.split(_SEPARATOR)[:-1]
        self._more.set()
        self._more = asyncio.Event()

    def close(self) -> None:
        """No more events come from this router, complete or not."""
        self._is_closed = True
        self._more.set()

    @property
    def is_complete(self) -> bool:
        """Whether there will be no more."""
        return bool(self._events) and is_last(self._events[-1])

    async def follow(self, after: int, *, wait_s: float) -> AsyncIterator[bytes]:
        """Events with larger numbers than `after`, until no more come; an empty one if none came for `wait_s`."""
        number = after + 1
        while True:
            while number < len(self._events):
                event = self._events[number]
                number += 1
                yield event + _SEPARATOR
                if is_last(event):
                    return
            if self.is_complete or self._is_closed:
                return
            try:
                async with asyncio.timeout(wait_s):
                    await self._more.wait()
            except TimeoutError:
                yield b""

    async def write_to(self, state: StateStore, key: str) -> None:
        """Writes all events for other routers, until the last one is written. Call it again after a `StoreError`."""
        while not self.is_complete or self._num_written < len(self._events):
            if self._num_written == len(self._events):
                await self._more.wait()
            if not self.is_complete:
                await asyncio.sleep(_INTERVAL_S)
            batch = EventBatch(first=self._num_written, events=self._events[self._num_written :])
            num_bytes = sum(map(len, batch.events))
            # Beyond this, readers at other routers get the whole response at its end.
            if self._bytes_written + num_bytes <= MAX_EVENT_BYTES:
                await state.append(key, batch)
            self._num_written += len(batch.events)
            self._bytes_written += num_bytes
