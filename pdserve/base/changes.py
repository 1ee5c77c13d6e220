"""A version number that can be waited on: how shells tell each other that their state is another one now."""

from __future__ import annotations

import asyncio


class Changes:
    """Counts changes of something; a waiter that names the version it has seen never misses one."""

    def __init__(self) -> None:
        self._version = 0
        self._next = asyncio.Event()

    @property
    def version(self) -> int:
        """Grows with every change."""
        return self._version

    def bump(self) -> None:
        """Wakes everyone who waits."""
        self._version += 1
        self._next.set()
        self._next = asyncio.Event()

    async def wait(self, since: int) -> int:
        """Returns the version once it is another than `since`: at once when that is so already."""
        while self._version == since:
            await self._next.wait()
        return self._version
