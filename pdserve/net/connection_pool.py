"""Connections that concurrent users share: opened for the first one, and kept open for the next."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Hashable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Connection = TypeVar("Connection")


@dataclass(eq=False, slots=True)
class _Entry(Generic[Connection]):
    #: Held while the connection is being opened.
    opening: asyncio.Lock = field(default_factory=asyncio.Lock)
    connection: Connection | None = None
    num_users: int = 0


class ConnectionPool(Generic[Key, Connection]):
    """At most one open connection per key, counted by its users. Belongs to one event loop.

    A connection in use is never closed by the pool. One without users is closed by `sweep`, by `close`, or when it is
    the least recently used of more than `max_kept`.
    """

    def __init__(
        self,
        close: Callable[[Connection], Awaitable[None]],
        *,
        max_kept: int | None = None,
        is_open: Callable[[Connection], bool] = lambda connection: True,
    ) -> None:
        """`is_open` finds connections that have broken: the next user gets a new one. `max_kept` None: no limit."""
        self._close = close
        self._max_kept = max_kept
        self._is_open = is_open
        self._entries: OrderedDict[Key, _Entry[Connection]] = OrderedDict()

    @property
    def keys(self) -> list[Key]:
        """The keys of all connections, the least recently used first."""
        return list(self._entries)

    @asynccontextmanager
    async def use(self, key: Key, connect: Callable[[], Awaitable[Connection]]) -> AsyncIterator[Connection]:
        """The connection for `key`, open at least until the block ends, unless the peer closes it.

        Concurrent users wait for the first one's `connect`. When that fails, its error reaches that user only, and the
        next one tries again.
        """
        entry = self._entries.setdefault(key, _Entry())
        self._entries.move_to_end(key)
        entry.num_users += 1
        try:
            yield await self._connected(entry, connect)
        finally:
            entry.num_users -= 1
            await self._remove(self._unneeded())

    async def sweep(self, current: Collection[Key]) -> None:
        """Closes unused connections whose key is not in `current`."""
        await self._remove([key for key, entry in self._entries.items() if key not in current and not entry.num_users])

    async def close(self) -> None:
        """Closes every connection, in use or not."""
        await self._remove(list(self._entries))

    async def _connected(self, entry: _Entry[Connection], connect: Callable[[], Awaitable[Connection]]) -> Connection:
        async with entry.opening:
            if entry.connection is None or not self._is_open(entry.connection):
                entry.connection = await connect()
            return entry.connection

    def _unneeded(self) -> list[Key]:
        """Unused entries without an open connection, and the least recently used ones beyond the limit."""
        unused = [(key, entry.connection) for key, entry in self._entries.items() if not entry.num_users]
        broken = [key for key, connection in unused if connection is None or not self._is_open(connection)]
        if self._max_kept is None:
            return broken
        idle = [key for key, _ in unused if key not in broken]
        return broken + idle[: max(0, len(self._entries) - len(broken) - self._max_kept)]

    async def _remove(self, keys: Iterable[Key]) -> None:
        # All leave the pool before the first is closed, so that no new user gets one that is about to close.
        removed = [self._entries.pop(key).connection for key in keys]
        for connection in removed:
            if connection is not None:
                await self._close(connection)
