"""Channels to the decode workers that commits go to, one for each incarnation, the least recently used let go."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc

from kvtransfer.handover.ticket import Ticket
from pdserve.base.ids import Epoch, WorkerId
from pdserve.base.rpc import open_channel

_MAX_IDLE = 64


@dataclass(slots=True)
class _Entry:
    channel: grpc.aio.Channel
    users: int = 0


class DecodeChannels:
    """Opened by the first commit to a worker and kept for the next."""

    def __init__(self) -> None:
        self._entries: OrderedDict[tuple[WorkerId, Epoch], _Entry] = OrderedDict()

    @asynccontextmanager
    async def use(self, ticket: Ticket) -> AsyncIterator[grpc.aio.Channel]:
        """The channel to the worker that granted the ticket; open at least until the block ends."""
        key = (ticket.worker_id, ticket.epoch)
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = _Entry(open_channel(ticket.grpc_address))
        self._entries.move_to_end(key)
        entry.users += 1
        try:
            yield entry.channel
        finally:
            entry.users -= 1
            await self._let_idle_go()

    async def close(self) -> None:
        """Closes all."""
        while self._entries:
            await self._entries.popitem()[1].channel.close()

    async def _let_idle_go(self) -> None:
        idle = [key for key, entry in self._entries.items() if not entry.users]
        for key in idle[: max(0, len(self._entries) - _MAX_IDLE)]:
            await self._entries.pop(key).channel.close()
