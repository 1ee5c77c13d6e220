"""/openapi.json, and /docs: a page that shows it, and needs no files but this router's.

The page has 12 KB and runs under the strictest policy of a browser. The usual viewers have 1.7 MB of script
(`swagger-ui-dist`) and 3.6 MB (`@scalar/api-reference`), which every image of a router would carry.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from pathlib import Path

from aiohttp import web

from router_svc.api.console.page import STATIC as CONSOLE_FILES
from router_svc.api.reference.document import Route, encode_document
from router_svc.api.static_page import Asset, StaticPage, asset_of, asset_response
from router_svc.routing.timeouts import MAX_TIMEOUT_S

STATIC = Path(__file__).parent / "static"
#: Files of the console that the page uses, too.
SHARED = ("console.css", "dom.js", "icon.svg", "theme.js")
_JSON = "application/json"


class Reference:
    """The document of one listener, and its page."""

    def __init__(self, max_timeout_s: float = MAX_TIMEOUT_S) -> None:
        self._max_timeout_s = max_timeout_s
        files = [*sorted(STATIC.iterdir()), *(CONSOLE_FILES / name for name in SHARED)]
        self._page = StaticPage("/docs", files)
        self._served: Collection[Route] = ()
        self._document: Asset | None = None
        self._making = asyncio.Lock()

    def routes(self) -> list[web.RouteDef]:
        """The endpoints for the application."""
        return [web.get("/openapi.json", self._openapi), *self._page.routes()]

    def describe(self, routes: Collection[web.AbstractRouteDef]) -> None:
        """Sets what the document describes: the routes of the listener. It is made when it is first read."""
        found = [route for route in routes if isinstance(route, web.RouteDef)]
        self._served = {(route.method, _plain(route.path)) for route in found}

    async def _openapi(self, request: web.Request) -> web.Response:
        async with self._making:
            if self._document is None:
                body = await asyncio.to_thread(encode_document, self._served, self._max_timeout_s)
                self._document = asset_of(body, _JSON)
        return asset_response(request, self._document)


def _plain(path: str) -> str:
    """A path without the pattern of its parameter, as in `{name:.+}`."""
    head, found, tail = path.partition(":")
    return head + tail[tail.index("}") :] if found else path
