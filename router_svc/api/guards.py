"""Middlewares that every HTTP request passes before its handler: names of the server, and foreign web pages."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection

from aiohttp import hdrs, web
from aiohttp.typedefs import Middleware

from pdserve.net.hosts import ANY, AllowedHosts

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_METHODS = "GET, POST"
#: Seconds for which a browser remembers what it may send.
_PREFLIGHT_AGE_S = 600
#: What scripts of other origins may read besides the body.
_EXPOSED = (
    "X-Request-Id, request-id, Retry-After, Pdserve-Ignored-Fields, "
    "x-ratelimit-limit-requests, x-ratelimit-remaining-requests, x-ratelimit-reset-requests, "
    "x-ratelimit-limit-tokens, x-ratelimit-remaining-tokens, x-ratelimit-reset-tokens"
)


def known_hosts(allowed: AllowedHosts) -> Middleware:
    """A middleware that raises `Forbidden` for a request under another name."""

    @web.middleware
    async def checked(request: web.Request, handler: Handler) -> web.StreamResponse:
        allowed.check(request.headers.getall(hdrs.HOST, ()))
        return await handler(request)

    return checked


def add_cross_origin(app: web.Application, origins: Collection[str]) -> None:
    """Lets web pages of these origins call the API. Without origins, browsers keep all other pages away."""
    if not origins:
        return

    def is_allowed(request: web.Request) -> bool:
        origin = request.headers.get(hdrs.ORIGIN)
        return origin is not None and (ANY in origins or origin in origins)

    async def allow(request: web.Request, response: web.StreamResponse) -> None:
        response.headers.add(hdrs.VARY, hdrs.ORIGIN)
        if is_allowed(request):
            # Never with credentials: a key is sent by the script that has it, not by the browser.
            response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = request.headers[hdrs.ORIGIN]
            response.headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = _EXPOSED

    @web.middleware
    async def preflight(request: web.Request, handler: Handler) -> web.StreamResponse:
        asks = request.method == hdrs.METH_OPTIONS and hdrs.ACCESS_CONTROL_REQUEST_METHOD in request.headers
        if not (asks and is_allowed(request)):
            return await handler(request)
        wanted = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS, "")
        return web.Response(
            status=204,
            headers={
                hdrs.ACCESS_CONTROL_ALLOW_METHODS: _METHODS,
                hdrs.ACCESS_CONTROL_ALLOW_HEADERS: wanted,
                hdrs.ACCESS_CONTROL_MAX_AGE: str(_PREFLIGHT_AGE_S),
            },
        )

    app.middlewares.append(preflight)
    app.on_response_prepare.append(allow)
