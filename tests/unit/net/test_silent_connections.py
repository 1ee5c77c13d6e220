"""Connections without a request are closed, and those with one are left alone for as long as it takes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from pdserve.net.admin import bound_socket, serve_http
from pdserve.net.silent_connections import FIRST_REQUEST_S, SilentConnections


@asynccontextmanager
async def serving(go_on: asyncio.Event) -> AsyncIterator[tuple[str, int]]:
    async def slow(_: web.Request) -> web.Response:
        await go_on.wait()
        return web.Response(text="done")

    app = web.Application()
    app.router.add_get("/", slow)
    with bound_socket("127.0.0.1", 0, flag="--port") as listener:
        async with serve_http(app, listener, first_request_s=0.02) as address:
            host, _, port = address.rpartition(":")
            yield host, int(port)


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost: a\r\n", b"GET / HTTP/1.1\r\nX: " + b"a" * 1000])
async def test_a_connection_without_a_whole_request_is_closed(sent: bytes) -> None:
    """Fails without `SilentConnections`: aiohttp itself waits for ever, and each connection holds a descriptor."""
    async with serving(asyncio.Event()) as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(sent)
        assert await reader.read() == b""
        writer.close()


async def test_a_request_takes_as_long_as_it_needs_and_its_connection_stays_for_the_next() -> None:
    go_on = asyncio.Event()
    async with serving(go_on) as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        # Its closing shows that sweeps have come and gone.
        idle, other = await asyncio.open_connection(*address)
        assert await idle.read() == b""
        other.close()
        go_on.set()
        for _ in range(2):
            assert (await reader.readuntil(b"done")).startswith(b"HTTP/1.1 200")
            writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        writer.close()


def test_a_connection_has_its_time_from_when_it_was_first_seen() -> None:
    class Connection:
        is_closed = False

        def force_close(self) -> None:
            self.is_closed = True

    early, late = Connection(), Connection()
    silent = SilentConnections()
    silent.sweep([early], 100.0)  # type: ignore[list-item]
    silent.sweep([early, late], 99.9 + FIRST_REQUEST_S)  # type: ignore[list-item]
    assert not early.is_closed
    silent.sweep([early, late], 100.0 + FIRST_REQUEST_S)  # type: ignore[list-item]
    assert (early.is_closed, late.is_closed) == (True, False)
