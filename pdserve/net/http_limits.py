"""Limits of a request's line and headers, and the answers to what exceeds them or is not HTTP."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage, HttpProcessingError, LineTooLong

from pdserve.base.errors import HeadersTooLarge, PdserveError, RequestError, codes_of

#: Reverse proxies pass on cookies and tokens of 9 KB and more; nginx and HAProxy take 32 KiB of headers.
MAX_LINE_BYTES, MAX_HEADER_BYTES, MAX_ALL_HEADERS_BYTES = 16 * 1024, 32 * 1024, 64 * 1024
MAX_HEADERS = 128

#: Settings of aiohttp's server.
SERVER_SETTINGS: dict[str, Any] = {
    "access_log": None,
    # aiohttp would also decompress the rest of a refused body: a megabyte can become gigabytes.
    "auto_decompress": False,
    "max_line_size": MAX_LINE_BYTES,
    "max_field_size": MAX_HEADER_BYTES,
    "max_headers": MAX_HEADERS,
}
_LIMITS = (
    f"(limits: {MAX_LINE_BYTES} bytes for the request line, {MAX_HEADER_BYTES} for a header, {MAX_ALL_HEADERS_BYTES} "
    f"for all headers, {MAX_HEADERS} headers). Send fewer or shorter ones; large ones are often cookies."
)
_TOO_MANY = "Too many headers"

#: Makes the response to what cannot be read as a request.
UnreadableForm = Callable[[PdserveError], web.Response]


def plain_error(error: PdserveError) -> web.Response:
    """`{"error": "..."}`."""
    return web.json_response({"error": str(error)}, status=codes_of(error).http)


class LimitedConnection(web.RequestHandler):
    """A connection that answers to what is not HTTP in the server's form, and keeps no headers beyond the limit."""

    __slots__ = ("_form", "_unread")

    def __init__(self, server: web.Server, form: UnreadableForm, **settings: Any) -> None:
        """`settings` are those of aiohttp's own class."""
        super().__init__(server, **settings)
        self._form = form
        #: Bytes of headers whose end has not arrived yet.
        self._unread = 0

    def data_received(self, data: bytes) -> None:
        """Also answers when all headers together are too long. The parser keeps each that is within its own limit."""
        super().data_received(data)
        waits_for_request = self._waiter is not None and not self._waiter.done()
        self._unread = self._unread + len(data) if waits_for_request else 0
        if self._unread > MAX_LINE_BYTES + MAX_ALL_HEADERS_BYTES and self.transport is not None:
            self.transport.write(_as_bytes(self._form(HeadersTooLarge(f"The headers are too long {_LIMITS}"))))
            self.force_close()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Logs the error, as aiohttp does, and answers without repeating what was sent."""
        usual = super().handle_error(request, status, exc, message)
        if not isinstance(exc, HttpProcessingError):
            return usual
        response = self._form(_as_ours(exc))
        response.force_close()
        return response


def _as_bytes(response: web.Response) -> bytes:
    body = response.body
    assert isinstance(body, bytes)
    head = f"HTTP/1.1 {response.status} {HTTPStatus(response.status).phrase}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body


def _as_ours(error: HttpProcessingError) -> PdserveError:
    if isinstance(error, LineTooLong):
        return HeadersTooLarge(f"The request line or a header is too long {_LIMITS}")
    if isinstance(error, BadHttpMessage) and _TOO_MANY in error.message:
        return HeadersTooLarge(f"The request has too many headers {_LIMITS}")
    return RequestError(f"The request is not valid HTTP/1.1 ({type(error).__name__}).")


@web.middleware
async def bounded_headers(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """A middleware that raises `HeadersTooLarge`."""
    # Each header also has `: ` and the end of its line.
    size = sum(len(name) + len(value) + 4 for name, value in request.raw_headers)
    if size > MAX_ALL_HEADERS_BYTES:
        raise HeadersTooLarge(f"The request has {size} bytes of headers {_LIMITS}")
    return await handler(request)
