"""Events of a response that runs on its own, as server-sent events to one client of several."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from aiohttp import web

from pdserve.base.errors import PdserveError
from pdserve.base.json_lines import on_one_line
from pdserve.base.logs import get_logger
from router_svc.api.http_request import REQUEST_ID_HEADER
from router_svc.api.ids import Ids
from router_svc.request.stream import WRITE_TIMEOUT_S

log = get_logger(__name__)

_COMMENT = b": the next token is awaited\n\n"


async def send_events(request: web.Request, ids: Ids, events: AsyncIterator[bytes]) -> web.StreamResponse:
    """Sends events, and a comment for each empty one. An error before the first one is raised.

    A later error breaks the connection off: a reader that has no last event knows that there are more.
    """
    response = web.StreamResponse(
        headers={
            "Content-Type": "text/event-stream; charset=utf-8",
            "Cache-Control": "no-cache",
            "X-Accel-Buffering": "no",
            REQUEST_ID_HEADER: ids.header,
        }
    )
    try:
        async for event in events:
            if not response.prepared:
                await response.prepare(request)
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                # A router of the last release may have stored the event on several lines.
                await response.write(on_one_line(event) or _COMMENT)
        if not response.prepared:
            await response.prepare(request)
        async with asyncio.timeout(WRITE_TIMEOUT_S):
            await response.write_eof()
    except TimeoutError:
        raise ConnectionResetError(f"the client has read nothing for {WRITE_TIMEOUT_S:g} s") from None
    except PdserveError as error:
        if not response.prepared:
            raise
        log.warning("events_broke_off", id=ids.header, reason=error)
        raise ConnectionResetError("further events cannot be read") from error
    return response
