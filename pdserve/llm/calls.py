"""Calls on an event loop that end when their owner does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pdserve.llm.errors import ShutDown


class Calls:
    """The calls that run, until `end`."""

    def __init__(self) -> None:
        self._scopes: set[asyncio.Timeout] = set()
        self._none_runs = asyncio.Event()
        self._none_runs.set()
        self._is_over = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Raises `ShutDown` when all calls are ended, and at once if they have been."""
        if self._is_over:
            raise ShutDown
        scope = asyncio.timeout(None)
        try:
            async with scope:
                self._scopes.add(scope)
                self._none_runs.clear()
                try:
                    yield
                finally:
                    self._scopes.discard(scope)
                    if not self._scopes:
                        self._none_runs.set()
        except TimeoutError:
            if scope.expired():
                raise ShutDown from None
            raise

    async def end(self) -> None:
        """Ends all calls, and returns when they have ended. Idempotent."""
        self._is_over = True
        for scope in self._scopes:
            scope.reschedule(asyncio.get_running_loop().time())
        await self._none_runs.wait()
