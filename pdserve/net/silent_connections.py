"""Closes connections on which no request arrives: each takes a descriptor, of which a process has a limited number.

A connection that has once had a request is closed by aiohttp after `IDLE_S` without another one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager

from aiohttp import web

#: Time for the whole header of the first request.
FIRST_REQUEST_S = 30.0
#: Longer than load balancers keep the connections of their pools.
IDLE_S = 650.0


class SilentConnections:
    """The connections of one server that have had no request yet."""

    def __init__(self, timeout_s: float = FIRST_REQUEST_S) -> None:
        self._timeout_s = timeout_s
        self._spoken: set[web.RequestHandler] = set()
        self._seen_at: dict[web.RequestHandler, float] = {}

    def watch(self, app: web.Application) -> None:
        """Takes note of the requests of an application that does not serve yet."""

        @web.middleware
        async def noted(
            request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
        ) -> web.StreamResponse:
            self._spoken.add(request.protocol)
            return await handler(request)

        app.middlewares.insert(0, noted)

    def sweep(self, connections: Iterable[web.RequestHandler], now: float) -> None:
        """Closes connections that have had no request for `timeout_s`. Call it at least twice in that time."""
        every = set(connections)
        self._spoken &= every
        self._seen_at = {each: self._seen_at.get(each, now) for each in every - self._spoken}
        for connection, seen_at in self._seen_at.items():
            if now - seen_at >= self._timeout_s:
                connection.force_close()

    @contextmanager
    def swept(self, server: web.Server) -> Iterator[None]:
        """Sweeps the connections of the server until the block ends."""
        loop = asyncio.get_running_loop()
        timers: list[asyncio.TimerHandle] = []

        def sweep() -> None:
            self.sweep(server.connections, loop.time())
            timers[:] = [loop.call_later(self._timeout_s / 2, sweep)]

        timers.append(loop.call_later(self._timeout_s / 2, sweep))
        try:
            yield
        finally:
            timers[0].cancel()
