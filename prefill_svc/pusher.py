"""Sends what a prompt's steps have stored, in a task of its own: first tokens do not wait for the wire."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from kvtransfer.handover.sender import OutgoingTransfer
from kvtransfer.handover.ticket import Ticket
from pdserve.base.device_event import DeviceEvent
from pdserve.base.ids import BlockId
from pdserve.base.tasks import service_group


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A group of layers of neighbouring blocks."""

    block_ids: Sequence[BlockId]
    group: int
    after: DeviceEvent | None


class Pusher:
    """The queue between a prompt's steps and its transfer. Belongs to the event loop."""

    def __init__(self, transfer: OutgoingTransfer, ticket: Ticket) -> None:
        self.transfer = transfer
        self._groups = ticket.groups
        self._bundle_blocks = ticket.bundle_blocks
        self._first_block = ticket.first_block
        self._end = ticket.first_block + ticket.num_blocks
        #: Of each group: the first of the prompt's blocks that was not queued, and is not there already.
        self._next_block = [ticket.first_block] * ticket.layer_groups
        #: The first of them is being sent.
        self._parts: deque[_Part] = deque()
        self._more = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def is_idle(self) -> bool:
        """All that was stored is on the wire."""
        return self._idle.is_set()

    def stored(
        self,
        block_table: Sequence[BlockId],
        num_blocks: int,
        *,
        num_layers: int | None = None,
        at: DeviceEvent | None = None,
    ) -> None:
        """The prompt's first `num_blocks` blocks have their first `num_layers` layers, or will have them `at`.

        Without `num_layers` they have all.
        """
        stop = self._whole_bundles(num_blocks)
        count = self._groups.count if num_layers is None else self._groups.num_completed_by(num_layers)
        for group, first in enumerate(self._next_block[:count]):
            if stop > first:
                self._parts.append(_Part(block_ids=block_table[first:stop], group=group, after=at))
                self._next_block[group] = stop
                self._idle.clear()
                self._more.set()

    def _whole_bundles(self, num_blocks: int) -> int:
        """The last bundle may be cut short; the others leave when all of their blocks are there."""
        if num_blocks >= self._end:
            return self._end
        return num_blocks - max(0, num_blocks - self._first_block) % self._bundle_blocks

    async def run(self) -> None:
        """Sends until it is cancelled. Raises what `OutgoingTransfer.push` does."""
        while True:
            while self._parts:
                part = self._parts[0]
                await self.transfer.push(part.block_ids, group=part.group, after=part.after)
                self._parts.popleft()
            self._idle.set()
            self._more.clear()
            await self._more.wait()

    async def drained(self) -> None:
        """Returns when all that was stored is on the wire."""
        await self._idle.wait()


@asynccontextmanager
async def pushing(transfer: OutgoingTransfer, ticket: Ticket) -> AsyncIterator[Pusher]:
    """A pusher that runs until the block is left. When it fails, the block is cancelled and its error raised."""
    pusher = Pusher(transfer, ticket)
    try:
        async with service_group() as tasks:
            tasks.start(pusher.run(), name="push")
            yield pusher
    except ExceptionGroup as both:  # The block failed when it was to be cancelled.
        raise both.exceptions[0] from None
