"""The peers this process sends to: one connection per data address, shared by concurrent transfers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

from kvtransfer.transport import Peer, Transport
from pdserve.base.errors import TransferTimeout
from pdserve.net.connection_pool import ConnectionPool


class PeerTable:
    """Data address -> connected peer. A restarted worker has another address and so is another peer."""

    def __init__(self, transport: Transport, *, max_kept: int = 256) -> None:
        """Beyond `max_kept` peers, the least recently used one without a transfer is disconnected."""
        self._transport = transport
        self._pool: ConnectionPool[bytes, Peer] = ConnectionPool(
            self._disconnect, max_kept=max_kept, is_open=lambda peer: not peer.closed
        )

    @asynccontextmanager
    async def use(
        self, address: bytes, connect: Callable[[], Awaitable[Peer]], *, deadline: float
    ) -> AsyncIterator[Peer]:
        """A connected peer, kept connected until the block ends. `deadline` is in event loop time, in seconds.

        Raises: PeerLost, TransferTimeout.
        """
        async with AsyncExitStack() as stack:
            connecting = self._pool.use(address, connect)
            try:
                async with asyncio.timeout_at(deadline):
                    peer = await stack.enter_async_context(connecting)
            except TimeoutError as error:
                raise TransferTimeout("the decode worker could not be connected to within the lease") from error
            yield peer

    async def _disconnect(self, peer: Peer) -> None:
        self._transport.disconnect(peer)
