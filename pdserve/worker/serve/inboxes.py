"""The requests a worker holds, one session each; a newer attempt of a request takes the place of an older one."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from pdserve.base.errors import PdserveError, StaleAttempt
from pdserve.base.ids import RequestId

Event = TypeVar("Event")
Kind = TypeVar("Kind")


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The session cannot go on."""

    error: PdserveError


class Inbox(Generic[Event]):
    """What one request's handler and the rest of the worker share: an inbox of events, in order."""

    def __init__(self, request_id: RequestId, attempt: int) -> None:
        self.request_id = request_id
        self.attempt = attempt
        self.closed = asyncio.Event()
        # Bounded by what a request can cause: one event of each kind per step until max_tokens. What peers send, those
        # who put it here bound.
        self._inbox: deque[Event | Failed] = deque()
        self._arrived = asyncio.Event()

    def put(self, event: Event | Failed) -> None:
        """Adds an event; never blocks."""
        self._inbox.append(event)
        self._arrived.set()

    async def next(self, *, timeout_s: float | None = None) -> Event | None:
        """The next event, or None after `timeout_s`. Raises the error of a `Failed`."""
        if not self._inbox:
            self._arrived.clear()
            if timeout_s is None:
                await self._arrived.wait()
            else:
                try:
                    async with asyncio.timeout(timeout_s):
                        await self._arrived.wait()
                except TimeoutError:
                    return None
        event = self._inbox.popleft()
        if isinstance(event, Failed):
            raise event.error
        return event

    def more(self, kind: type[Kind]) -> Iterator[Kind]:
        """The events of this kind that come next and are here already."""
        while self._inbox and isinstance(event := self._inbox[0], kind):
            self._inbox.popleft()
            yield event


class Inboxes(Generic[Event]):
    """All sessions of a worker, by request id. Belongs to the event loop."""

    def __init__(self) -> None:
        self._sessions: dict[RequestId, Inbox[Event]] = {}

    def find(self, request_id: RequestId) -> Inbox[Event] | None:
        """The request's session, if it is here."""
        return self._sessions.get(request_id)

    def put(self, request_id: RequestId, event: Event | Failed) -> None:
        """Hands an event to a session; events of requests that have left are dropped."""
        session = self._sessions.get(request_id)
        if session is not None:
            session.put(event)

    @asynccontextmanager
    async def open(self, request_id: RequestId, attempt: int) -> AsyncIterator[Inbox[Event]]:
        """The request's session until the block ends. An older attempt is ended first, and awaited.

        Raises: StaleAttempt when this attempt is not newer than the one here.
        """
        while (older := self._sessions.get(request_id)) is not None:
            if attempt <= older.attempt:
                raise StaleAttempt(
                    f"Attempt {attempt} of request {request_id}: attempt {older.attempt} is already here."
                )
            older.put(Failed(error=StaleAttempt(f"Attempt {attempt} of {request_id} took over.")))
            await older.closed.wait()
        session = self._sessions[request_id] = Inbox[Event](request_id, attempt)
        try:
            yield session
        finally:
            del self._sessions[request_id]
            session.closed.set()
