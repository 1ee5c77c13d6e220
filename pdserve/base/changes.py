"""A version number to wait on, through which one task learns that another's state has changed."""

from __future__ import annotations

import asyncio


class Changes:
    """Counts changes. A waiter that names the last version it has seen never misses one."""

    def __init__(self) -> None:
        self._version = 0
        self._next = asyncio.Event()

    @property
    def version(self) -> int:
        """The number of changes so far."""
        return self._version

    def bump(self) -> None:
        """Counts a change and wakes all waiters."""
        self._version += 1
        self._next.set()
        self._next = asyncio.Event()

    async def wait(self, since: int) -> int:
        """Returns the version once it differs from `since`, which may be immediately."""
        while self._version == since:
            await self._next.wait()
        return self._version
