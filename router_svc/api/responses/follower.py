"""One reader of the events of a background response, wherever that runs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

from pdserve.base.errors import StoreError, Unreadable
from router_svc.api.responses.background_run import BackgroundRun
from router_svc.api.responses.feed import is_last
from router_svc.api.responses.formatter import last_event
from router_svc.api.responses.stored import StoredResponses
from router_svc.state.response_record import ResponseRecord, record_key
from router_svc.state.state_store import Stage

#: A reader gets a comment at least this often.
KEEP_ALIVE_S = 10.0
#: A reader waits this long for events of another router before it looks whether that router is lost.
_WAIT_S = 1.0
_RETRY_S = 0.5


class EventReader:
    """Reads events from a run of this router, else from the store, and the end from the record."""

    def __init__(
        self,
        record: ResponseRecord,
        stored: StoredResponses,
        runs: Mapping[str, BackgroundRun],
        adopt: Callable[[str], Awaitable[None]],
    ) -> None:
        """`adopt` takes over a response that no router runs."""
        self._record = record
        self._key = record_key(record.tenant, record.id)
        self._stored = stored
        self._runs = runs
        self._adopt = adopt
        self._number = -1
        self._is_done = False

    async def events(self, after: int) -> AsyncIterator[bytes]:
        """Events with larger numbers than `after`, to the last one. An empty one says that none came for a time.

        Waits while the store is away, until the response's deadline. Raises `StoreError` then, and when the store is
        away at the start.
        """
        self._number = after
        is_first = True
        while not self._is_done:
            try:
                async for event in self._next():
                    is_first = False
                    self._number += bool(event)
                    self._is_done = self._is_done or is_last(event)
                    yield event
            except StoreError as error:
                if is_first or isinstance(error, Unreadable) or time.time() >= self._record.expires_at:
                    raise
                yield b""
                await asyncio.sleep(_RETRY_S)

    async def _next(self) -> AsyncIterator[bytes]:
        """What there is now, or comes soon."""
        run = self._runs.get(self._key)
        if run is not None:
            async for event in run.feed.follow(self._number, wait_s=KEEP_ALIVE_S):
                yield event
            if self._is_done or not run.feed.is_complete:
                return
        # The stage is read without the record, which may be long.
        stage = await self._stored.state.stage(self._key)
        if stage is Stage.ENDED and not self._record.is_terminal:
            self._record = await self._stored.read(self._key) or self._record
        if stage is Stage.GONE or (self._record.is_terminal and self._has_all()):
            self._is_done = True
            return
        if stage is Stage.LEFT:
            await self._adopt(self._key)
        is_quiet = True
        async for event in self._written():
            is_quiet = False
            yield event
        if is_quiet and self._record.is_terminal:
            # Its events are no longer kept, or not all of them were.
            yield last_event(max(self._number + 1, self._record.num_events - 1), self._record.response)
        elif is_quiet:
            yield b""

    async def _written(self) -> AsyncIterator[bytes]:
        """Events that another router has written, in order and without a gap. Waits for more, but not for long."""
        number = self._number
        for batch in await self._stored.state.events(self._key, number, wait_s=_WAIT_S):
            if batch.first != number + 1:
                return
            for event in batch.events:
                yield event + b"\n\n"
                number += 1

    def _has_all(self) -> bool:
        """Whether the reader has all events of a response that has ended.

        A response that failed or was cancelled may have fewer events than the reader has from a router that was lost.
        """
        last = self._record.num_events - 1
        is_repeatable = self._record.response.status in ("completed", "incomplete")
        return last >= 0 and (self._number == last or (is_repeatable and self._number > last))
