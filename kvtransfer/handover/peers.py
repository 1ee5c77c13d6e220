"""The peers this process sends to, one connection per data address, the least recently used let go."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from kvtransfer.transport import Peer, Transport
from pdserve.base.errors import TransferTimeout


@dataclass(eq=False, slots=True)
class _Entry:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    peer: Peer | None = None
    users: int = 0


class PeerTable:
    """Data address -> connected peer. A restarted worker has another address and so is another peer."""

    def __init__(self, transport: Transport, *, max_idle: int = 256) -> None:
        self._transport = transport
        self._max_idle = max_idle
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()

    @asynccontextmanager
    async def use(self, address: bytes, *, deadline: float) -> AsyncIterator[Peer]:
        """A connected peer, kept connected as long as somebody uses it. `deadline` is in event loop time.

        Raises: PeerLost, TransferTimeout.
        """
        entry = self._entries.setdefault(address, _Entry())
        self._entries.move_to_end(address)
        entry.users += 1
        try:
            yield await self._connected(address, entry, deadline)
        finally:
            entry.users -= 1
            self._let_idle_go()

    async def _connected(self, address: bytes, entry: _Entry, deadline: float) -> Peer:
        try:
            async with asyncio.timeout_at(deadline), entry.lock:
                if entry.peer is None or entry.peer.closed:
                    entry.peer = await self._transport.connect(address)
                return entry.peer
        except TimeoutError as error:
            raise TransferTimeout("the decode worker could not be connected to within the lease") from error

    def _let_idle_go(self) -> None:
        dead = [a for a, e in self._entries.items() if not e.users and (e.peer is None or e.peer.closed)]
        idle = [a for a, e in self._entries.items() if not e.users and a not in dead]
        for address in dead + idle[: max(0, len(self._entries) - len(dead) - self._max_idle)]:
            peer = self._entries.pop(address).peer
            if peer is not None:
                self._transport.disconnect(peer)
