"""Pages of the router: files that are served from memory, with headers that allow nothing else."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from pdserve.base.errors import NotFound

_INDEX = "index.html"
_CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
#: Everything comes from this router, no script or style is inline, and no text can become markup.
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
SECURITY_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Asset:
    """A file in memory."""

    body: bytes
    content_type: str
    etag: str


class StaticPage:
    """A page at a path, with its styles and modules below it."""

    def __init__(self, path: str, files: Iterable[Path]) -> None:
        """`path` starts with a slash. `files` of other kinds than a page's are left out."""
        self._path = path
        self._assets = {file.name: read_asset(file) for file in files if file.suffix in _CONTENT_TYPES}

    def routes(self) -> list[web.RouteDef]:
        """The endpoints for the application."""
        return [
            web.get(self._path, self._redirect),
            web.get(f"{self._path}/", self._index),
            web.get(f"{self._path}/{{name}}", self._asset),
        ]

    async def _redirect(self, _: web.Request) -> web.Response:
        # Relative, as are all links of the page: a proxy may serve it below another path.
        location = f"{self._path.removeprefix('/')}/"
        return web.Response(status=308, headers={"Location": location, **SECURITY_HEADERS})

    async def _index(self, request: web.Request) -> web.Response:
        return asset_response(request, self._assets[_INDEX])

    async def _asset(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        asset = self._assets.get(name)
        if asset is None:
            raise NotFound(f"The page {self._path} has no file {name[:100]!r}. Open {self._path}.")
        return asset_response(request, asset)


def read_asset(path: Path) -> Asset:
    """A file of a page."""
    return asset_of(path.read_bytes(), _CONTENT_TYPES[path.suffix])


def asset_of(body: bytes, content_type: str) -> Asset:
    """Content that is served like a file."""
    return Asset(body=body, content_type=content_type, etag=hashlib.blake2b(body, digest_size=12).hexdigest())


def asset_response(request: web.Request, asset: Asset) -> web.Response:
    """The file, or 304 for a client that has it."""
    # The browser asks each time whether its copy is current, so files of two versions are never mixed.
    headers = {"ETag": f'"{asset.etag}"', "Cache-Control": "no-cache", **SECURITY_HEADERS}
    known = request.if_none_match or ()
    if any(etag.value in (asset.etag, "*") for etag in known):
        return web.Response(status=304, headers=headers)
    return web.Response(body=asset.body, headers={"Content-Type": asset.content_type, **headers})
