"""One inbox for each request on a worker. A newer attempt of a request replaces an older one."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from pdserve.base.errors import PdserveError, StaleAttempt
from pdserve.base.ids import AttemptId, RequestId
from pdserve.net.streams import PeerLeft

Event = TypeVar("Event")
Kind = TypeVar("Kind")
Result = TypeVar("Result")

#: Interval of reporting that an older attempt is waited for.
_MEANWHILE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The request cannot go on: reading this event raises its error."""

    error: PdserveError | PeerLeft


class Inbox(Generic[Event]):
    """Events for one request's handler, in order. The rest of the worker puts them there."""

    def __init__(self, request_id: RequestId, attempt: int) -> None:
        self.request_id = request_id
        self.attempt = attempt
        self.attempt_id = AttemptId(request_id, attempt)
        self.closed = asyncio.Event()
        # Bounded by what a request can cause: one event of each kind per step until max_tokens. Events that come from
        # peers are bounded where they are put here.
        self._events: deque[Event | Failed] = deque()
        self._arrived = asyncio.Event()
        self._failure: Failed | None = None
        #: Limit of the work that `unless_failed` awaits at present.
        self._limit: asyncio.Timeout | None = None

    def put(self, event: Event | Failed) -> None:
        """Adds an event; never blocks."""
        self._events.append(event)
        self._arrived.set()
        if isinstance(event, Failed) and self._failure is None:
            self._failure = event
            if self._limit is not None:
                self._limit.reschedule(0)

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

    async def unless_failed(self, work: Awaitable[Result]) -> Result:
        """The result of `work`. A `Failed` that comes first, or has come already, cancels it and raises its error.

        A handler uses it for waits that others may prolong, so that the end of its request does not wait for them.
        """
        limit = asyncio.timeout_at(None if self._failure is None else 0)
        try:
            async with limit:
                self._limit = limit
                return await work
        except TimeoutError:
            if self._failure is None or not limit.expired():
                raise
            raise self._failure.error from None
        finally:
            self._limit = None

    def more(self, kind: type[Kind]) -> Iterator[Kind]:
        """The events of this kind at the head of the inbox, without waiting."""
        while self._events and isinstance(event := self._events[0], kind):
            self._events.popleft()
            yield event


class Inboxes(Generic[Event]):
    """All inboxes of a worker, by request id. Belongs to the event loop."""

    def __init__(self, on_stale: Callable[[str, StaleAttempt], None] = lambda kind, error: None) -> None:
        """`on_stale` is called with "start" for an attempt that is too late, "event" for an event of another one."""
        self._on_stale = on_stale
        self._inboxes: dict[RequestId, Inbox[Event]] = {}

    def put(self, request_id: RequestId, attempt: int, event: Event | Failed) -> None:
        """Delivers an event to this attempt. Drops events for a request that has left, or for another attempt."""
        inbox = self._inboxes.get(request_id)
        if inbox is None:
            return
        if attempt == inbox.attempt:
            inbox.put(event)
        else:
            self._on_stale(
                "event",
                StaleAttempt(f"An event of attempt {attempt} of request {request_id} met attempt {inbox.attempt}."),
            )

    def fail_all(self, error: PdserveError) -> None:
        """Ends every request here with this error."""
        for inbox in self._inboxes.values():
            inbox.put(Failed(error=error))

    @asynccontextmanager
    async def open(
        self, request_id: RequestId, attempt: int, *, meanwhile: Callable[[], Awaitable[object]] | None = None
    ) -> AsyncIterator[Inbox[Event]]:
        """The request's inbox until the block ends. An older attempt is ended first, and awaited.

        `meanwhile` is called for each second of this wait, so that the router learns that this worker lives.

        The older attempt's handler sees its end between two events, and at once in `unless_failed`. Otherwise a handler
        waits only for a step, for the end of a transfer, or for a peer that takes a message. A step ends at the latest
        with the process at `--stall-timeout-s`, a transfer with its lease, the wait for a peer when its host is dead.

        Raises: StaleAttempt when the attempt here is the same or a newer one.
        """
        while (older := self._inboxes.get(request_id)) is not None:
            if attempt <= older.attempt:
                error = StaleAttempt(
                    f"Attempt {attempt} of request {request_id} is stale: attempt {older.attempt} is already here."
                )
                self._on_stale("start", error)
                raise error
            older.put(Failed(error=StaleAttempt(f"Attempt {attempt} of request {request_id} took over.")))
            await _closed(older, meanwhile)
        inbox = self._inboxes[request_id] = Inbox[Event](request_id, attempt)
        try:
            yield inbox
        finally:
            del self._inboxes[request_id]
            inbox.closed.set()


async def _closed(inbox: Inbox[Event], meanwhile: Callable[[], Awaitable[object]] | None) -> None:
    while not inbox.closed.is_set():
        try:
            async with asyncio.timeout(None if meanwhile is None else _MEANWHILE_S):
                await inbox.closed.wait()
        except TimeoutError:
            if meanwhile is not None:
                await meanwhile()
