"""One inbox for each request on a worker. A newer attempt of a request replaces an older one."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from pdserve.base.errors import PdserveError, StaleAttempt
from pdserve.base.ids import RequestId

Event = TypeVar("Event")
Kind = TypeVar("Kind")


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The request cannot go on: reading this event raises its error."""

    error: PdserveError


class Inbox(Generic[Event]):
    """Events for one request's handler, in order. The rest of the worker puts them there."""

    def __init__(self, request_id: RequestId, attempt: int) -> None:
        self.request_id = request_id
        self.attempt = attempt
        self.closed = asyncio.Event()
        # Bounded by what a request can cause: one event of each kind per step until max_tokens. Events that come from
        # peers are bounded where they are put here.
        self._events: deque[Event | Failed] = deque()
        self._arrived = asyncio.Event()

    def put(self, event: Event | Failed) -> None:
        """Adds an event; never blocks."""
        self._events.append(event)
        self._arrived.set()

    async def next(self, *, timeout_s: float | None = None) -> Event | None:
        """The next event, or None after `timeout_s`. Raises the error of a `Failed`."""
        if not self._events:
            self._arrived.clear()
            if timeout_s is None:
                await self._arrived.wait()
            else:
                try:
                    async with asyncio.timeout(timeout_s):
                        await self._arrived.wait()
                except TimeoutError:
                    return None
        event = self._events.popleft()
        if isinstance(event, Failed):
            raise event.error
        return event

    def more(self, kind: type[Kind]) -> Iterator[Kind]:
        """The events of this kind at the head of the inbox, without waiting."""
        while self._events and isinstance(event := self._events[0], kind):
            self._events.popleft()
            yield event


class Inboxes(Generic[Event]):
    """All inboxes of a worker, by request id. Belongs to the event loop."""

    def __init__(self, on_stale: Callable[[StaleAttempt], None] = lambda error: None) -> None:
        """`on_stale` is called with each attempt that comes too late."""
        self._on_stale = on_stale
        self._inboxes: dict[RequestId, Inbox[Event]] = {}

    def put(self, request_id: RequestId, event: Event | Failed) -> None:
        """Delivers an event. One for a request that has already left is dropped."""
        inbox = self._inboxes.get(request_id)
        if inbox is not None:
            inbox.put(event)

    def fail_all(self, error: PdserveError) -> None:
        """Ends every request here with this error."""
        for inbox in self._inboxes.values():
            inbox.put(Failed(error=error))

    @asynccontextmanager
    async def open(self, request_id: RequestId, attempt: int) -> AsyncIterator[Inbox[Event]]:
        """The request's inbox until the block ends. An older attempt is ended first, and awaited.

        Raises: StaleAttempt when the attempt here is the same or a newer one.
        """
        while (older := self._inboxes.get(request_id)) is not None:
            if attempt <= older.attempt:
                error = StaleAttempt(
                    f"Attempt {attempt} of request {request_id} is stale: attempt {older.attempt} is already here."
                )
                self._on_stale(error)
                raise error
            older.put(Failed(error=StaleAttempt(f"Attempt {attempt} of request {request_id} took over.")))
            await older.closed.wait()
        inbox = self._inboxes[request_id] = Inbox[Event](request_id, attempt)
        try:
            yield inbox
        finally:
            del self._inboxes[request_id]
            inbox.closed.set()
