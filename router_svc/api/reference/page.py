"""/openapi.json, and /docs: a page that shows it, of files of this router alone.

The page has 12 KB and runs under the strictest policy of a browser. The usual viewers have 1.7 MB of script
(`swagger-ui-dist`) and 3.6 MB (`@scalar/api-reference`), which every image of a router would carry.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from pathlib import Path

from aiohttp import web

from pdserve.base.errors import NotFound
from router_svc.api.console.page import INDEX, SECURITY_HEADERS, Asset, asset_of, asset_response, read_asset
from router_svc.api.console.page import STATIC as CONSOLE_FILES
from router_svc.api.reference.document import Route, encode_document
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
        self._assets = {path.name: read_asset(path) for path in files}
        self._served: Collection[Route] = ()
        self._document: Asset | None = None
        self._making = asyncio.Lock()

    def routes(self) -> list[web.RouteDef]:
        """The endpoints for the application."""
        return [
            web.get("/openapi.json", self._openapi),
            web.get("/docs", self._redirect),
            web.get("/docs/", self._index),
            web.get("/docs/{name}", self._asset),
        ]

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

    async def _redirect(self, _: web.Request) -> web.Response:
        # Relative, as are all links of the page: a proxy may serve it below another path.
        return web.Response(status=308, headers={"Location": "docs/", **SECURITY_HEADERS})

    async def _index(self, request: web.Request) -> web.Response:
        return asset_response(request, self._assets[INDEX])

    async def _asset(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        asset = self._assets.get(name)
        if asset is None:
            raise NotFound(f"The page has no file {name[:100]!r}. Open /docs.")
        return asset_response(request, asset)


def _plain(path: str) -> str:
    """A path without the pattern of its parameter, as in `{name:.+}`."""
    head, found, tail = path.partition(":")
    return head + tail[tail.index("}") :] if found else path
