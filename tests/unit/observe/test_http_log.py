"""No line of the log repeats what a client sent, however broken its HTTP is."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage

from pdserve.net.admin import bound_socket, serve_http
from pdserve.net.http_limits import MAX_HEADER_BYTES, MAX_HEADERS, MAX_LINE_BYTES
from pdserve.observe.http_log import ServerLog

SECRET = b"swordfish"
_START = b"GET / HTTP/1.1\r\nHost: a\r\n"
#: What follows a proper request on its connection, and the status that answers it.
BROKEN = {
    "the rest of a body whose Content-Length was too small": (b"My password is swordfish, what is yours?\r\n\r\n", 400),
    "a control character in a key": (_START + b"Authorization: Bearer swordfish\x01\r\n\r\n", 400),
    "a header that is too long": (_START + b"x-api-key: swordfish" + b"x" * MAX_HEADER_BYTES + b"\r\n\r\n", 431),
    "too many headers": (_START + b"x: swordfish\r\n" * MAX_HEADERS + b"\r\n", 431),
    "a target that is too long": (b"GET /swordfish" + b"x" * MAX_LINE_BYTES + b" HTTP/1.1\r\nHost: a\r\n\r\n", 431),
}


async def _answer(_: web.Request) -> web.Response:
    return web.Response(text="ok")


@asynccontextmanager
async def _connection() -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection to a server that answers `ok` at its root."""
    app = web.Application()
    app.router.add_route("*", "/", _answer)
    with bound_socket("127.0.0.1", 0, flag="--port") as listener:
        async with serve_http(app, listener) as address:
            host, _, port = address.rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            yield reader, writer
            writer.close()


@pytest.mark.parametrize(("sent", "status"), BROKEN.values(), ids=BROKEN)
async def test_what_cannot_be_read_is_logged_and_answered_without_its_text(
    sent: bytes, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Without `ServerLog`, aiohttp logs up to 100 bytes of it with a traceback."""
    caplog.set_level(logging.DEBUG)
    async with _connection() as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        await reader.readuntil(b"ok")
        writer.write(sent)
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    assert head.split()[1] == b"%d" % status
    assert json.loads(body).keys() == {"error"}
    assert SECRET not in body
    assert SECRET.decode() not in caplog.text
    [record] = [record for record in caplog.records if record.message == "http_unreadable"]
    assert record.fields["count"] == 1  # type: ignore[attr-defined]


async def test_headers_without_an_end_are_answered_as_soon_as_they_exceed_their_limit() -> None:
    """The parser keeps up to 128 of them, each below its own limit: 4 MiB of a stranger's for every connection."""
    async with _connection() as (reader, writer):
        # A request with a large body before them is none of them.
        body = b"x" * 300_000
        writer.write(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        await reader.readuntil(b"ok")
        writer.write(_START)
        for index in range(4):
            writer.write(b"X-%d: " % index + b"x" * 30_000 + b"\r\n")
        head, _, answer = (await reader.read()).partition(b"\r\n\r\n")
    assert head.split()[1] == b"431"
    assert "65536 for all headers" in json.loads(answer)["error"]


def test_a_flood_of_what_cannot_be_read_is_one_line_in_ten_seconds(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    now = 100.0
    server_log = ServerLog(clock=lambda: now)
    for _ in range(1000):
        server_log.exception("Error handling request from %s", "10.0.0.7", exc_info=BadHttpMessage("swordfish"))
    now = 110.0
    server_log.debug("Error handling request from %s", "10.0.0.7", exc_info=BadHttpMessage("swordfish"))
    assert [record.fields["count"] for record in caplog.records] == [1, 1000]  # type: ignore[attr-defined]


def test_an_unexpected_error_keeps_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    ServerLog().exception("Unhandled exception", exc_info=ValueError("a bug"))
    assert "ValueError: a bug" in caplog.text


async def test_a_body_that_cannot_be_decoded_is_no_error_of_the_server(caplog: pytest.LogCaptureFixture) -> None:
    """Found by fuzzing: a body that no handler reads was logged as an error, with its traceback, for each request."""
    caplog.set_level(logging.INFO)
    async with _connection() as (reader, writer):
        headers = b"Host: a\r\nConnection: close\r\nContent-Encoding: gzip\r\nContent-Length: 9"
        writer.write(b"GET / HTTP/1.1\r\n" + headers + b"\r\n\r\nswordfish")
        answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 200")
    assert caplog.records == []


async def test_a_client_that_leaves_during_a_stream_is_no_error_of_the_server(caplog: pytest.LogCaptureFixture) -> None:
    """Found by fuzzing: each was logged as an error with its traceback when a write noticed it first."""
    caplog.set_level(logging.INFO)
    ended = asyncio.Event()

    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        assert request.transport is not None
        request.transport.abort()
        try:
            await response.write(b"x")
        finally:
            ended.set()
        return response

    app = web.Application()
    app.router.add_get("/", stream)
    with bound_socket("127.0.0.1", 0, flag="--port") as listener:
        async with serve_http(app, listener) as address:
            host, _, port = address.rpartition(":")
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
            await ended.wait()
            writer.close()
    assert caplog.records == []
