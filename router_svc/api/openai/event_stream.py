"""An answer as server-sent events, from its first byte to its last."""

from __future__ import annotations

import asyncio

from aiohttp import web

from pdserve.base.errors import PdserveError
from router_svc.api.http_request import REQUEST_ID_HEADER
from router_svc.api.ids import Ids
from router_svc.api.json_pieces import to_json
from router_svc.api.openai.errors import error_body
from router_svc.api.openai.shapes import DONE, ResponseFormatter
from router_svc.request.output import ChoiceDelta
from router_svc.request.stream import WRITE_TIMEOUT_S, DeltaSource


class EventStream:
    """Events to one client. Headers go out with the first token, so that an earlier error has its own status.

    A prompt that was admitted and waits long for its first token is an exception: comments keep its connection open.
    A client that reads slowly makes a write wait. One that disconnects makes it raise, or cancels the handler.
    """

    def __init__(self, request: web.Request, ids: Ids) -> None:
        self._request = request
        self._sse = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
                REQUEST_ID_HEADER: ids.header,
            }
        )
        self._has_events = False
        self._last = b""

    async def send(self, formatter: ResponseFormatter, source: DeltaSource) -> None:
        """Sends all tokens. Raises what ends the source early."""

        async def write(deltas: list[ChoiceDelta]) -> None:
            events = await formatter.events(deltas, source.usage if formatter.continuous_usage else None)
            if not self._has_events:
                self._has_events = True
                await self._prepare()
                events = await formatter.opening() + events
            if events:
                await self._sse.write(events)
                source.first_write()

        async def keep_alive() -> None:
            if self._sse.prepared or source.is_admitted:
                await self._prepare()
                await self._sse.write(formatter.comment)

        await source.write_to(write, keep_alive)
        self._last = formatter.closing(source.usage)

    def fail(self, error: PdserveError) -> None:
        """The last event is this error. Raises it if nothing was sent, so that the answer has its status."""
        if not self._sse.prepared:
            raise error
        self._last = b"data: %b\n\n" % to_json(error_body(error)) + DONE

    async def end(self) -> web.StreamResponse:
        """Sends the last events. Raises `ConnectionResetError` for a client that reads nothing.

        It comes after all work has ended, since it may take as long as the client pleases.
        """
        await self._prepare()  # The client may have all of a stream that it resumes.
        try:
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                await self._sse.write(self._last)
                await self._sse.write_eof()
        except TimeoutError:
            raise ConnectionResetError(f"the client has read nothing for {WRITE_TIMEOUT_S:g} s") from None
        return self._sse

    async def _prepare(self) -> None:
        if not self._sse.prepared:
            await self._sse.prepare(self._request)
