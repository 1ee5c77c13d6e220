"""The endpoint from which the console reads the state, as server-sent events."""

from __future__ import annotations

import asyncio

from aiohttp import web

from pdserve.base.logs import get_logger
from router_svc.api.console.feed import Feed
from router_svc.api.static_page import SECURITY_HEADERS

log = get_logger(__name__)

#: A reader that takes nothing for this long is disconnected.
WRITE_TIMEOUT_S = 10.0
#: Readers come back after this time, so that those whose host vanished do not keep their slots.
MAX_AGE_S = 900.0


class ConsoleEvents:
    """/console/events."""

    def __init__(self, feed: Feed, *, write_timeout_s: float = WRITE_TIMEOUT_S, max_age_s: float = MAX_AGE_S) -> None:
        self._feed = feed
        self._write_timeout_s = write_timeout_s
        self._max_age_s = max_age_s

    def routes(self) -> list[web.RouteDef]:
        """The endpoints for the application."""
        # A HEAD request would hold a reader's slot for nothing.
        return [web.get("/console/events", self._events, allow_head=False)]

    async def _events(self, request: web.Request) -> web.StreamResponse:
        stream = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-store",
                "X-Accel-Buffering": "no",
                **SECURITY_HEADERS,
            }
        )
        with self._feed.reader():
            await stream.prepare(request)
            try:
                async with asyncio.timeout(self._max_age_s):
                    await self._send_updates(request, stream)
            except TimeoutError:
                pass
        await stream.write_eof()
        return stream

    async def _send_updates(self, request: web.Request, stream: web.StreamResponse) -> None:
        """Sends each state while the reader keeps up. One that is late misses states, then gets a whole one."""
        version: int | None = None
        while (update := await self._feed.next(version)) is not None:
            event = update.difference if version == update.version - 1 else update.whole
            version = update.version
            try:
                async with asyncio.timeout(self._write_timeout_s):
                    await stream.write(event)
            except TimeoutError:
                log.info("console_reader_dropped", after_s=self._write_timeout_s)
                # Closing would wait until the reader has taken what is buffered.
                if request.transport is not None:
                    request.transport.abort()
                raise ConnectionResetError("the console's reader is too slow") from None
