"""Limits of a request's line and headers, and the answers to what exceeds them or is no HTTP."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage, HttpProcessingError, LineTooLong
from aiohttp.typedefs import Middleware

from pdserve.base.errors import HeadersTooLarge, PdserveError, RequestError, codes_of

#: Bytes. Reverse proxies pass on cookies and tokens of 9 KB and more; nginx and HAProxy take 32 KiB of headers.
MAX_LINE, MAX_FIELD, MAX_HEADERS = 16 * 1024, 32 * 1024, 64 * 1024
MAX_FIELDS = 128

#: What aiohttp's server takes.
SERVER_LIMITS: dict[str, Any] = {
    "max_line_size": MAX_LINE,
    "max_field_size": MAX_FIELD,
    "max_headers": MAX_FIELDS,
}
_LIMITS = (
    f"(limits: {MAX_LINE} bytes for the request line, {MAX_FIELD} for a header, {MAX_HEADERS} for all headers, "
    f"{MAX_FIELDS} headers). Send fewer or shorter ones; large ones are often cookies."
)
_TOO_MANY = "Too many headers"

#: Makes the response to a request that never became one.
ErrorForm = Callable[[PdserveError], web.Response]


def plain_error(error: PdserveError) -> web.Response:
    """`{"error": "..."}`."""
    return web.json_response({"error": str(error)}, status=codes_of(error).http)


def connections_of(server: web.Server, form: ErrorForm) -> Callable[[], web.RequestHandler]:
    """The server's factory of connections. They answer in this form to what is no HTTP, and then close."""

    class Connection(web.RequestHandler):
        """A connection of this server."""

        __slots__ = ()

        def handle_error(
            self,
            request: web.BaseRequest,
            status: int = 500,
            exc: BaseException | None = None,
            message: str | None = None,
        ) -> web.StreamResponse:
            """Logs the error, as aiohttp does, and answers without what was sent."""
            usual = super().handle_error(request, status, exc, message)
            if not isinstance(exc, HttpProcessingError):
                return usual
            response = form(_as_ours(exc))
            response.force_close()
            return response

    def connect() -> web.RequestHandler:
        connection = server()
        # aiohttp has no parameter for the class.
        connection.__class__ = Connection
        return connection

    return connect


def _as_ours(error: HttpProcessingError) -> PdserveError:
    if isinstance(error, LineTooLong):
        return HeadersTooLarge(f"The request line or a header is too long {_LIMITS}")
    if isinstance(error, BadHttpMessage) and _TOO_MANY in error.message:
        return HeadersTooLarge(f"The request has too many headers {_LIMITS}")
    return RequestError(f"The request is no valid HTTP/1.1 ({type(error).__name__}).")


@web.middleware
async def _bounded(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    # With `: ` and the end of the line.
    size = sum(len(name) + len(value) + 4 for name, value in request.raw_headers)
    if size > MAX_HEADERS:
        raise HeadersTooLarge(f"The request has {size} bytes of headers {_LIMITS}")
    return await handler(request)


#: A middleware that raises `HeadersTooLarge`.
bounded_headers: Middleware = _bounded
