"""Sends what a prompt's steps have stored, in a task of its own: first tokens do not wait for the wire."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from kvtransfer.handover.outgoing import OutgoingTransfer
from kvtransfer.handover.ticket import Ticket
from pdserve.base.device_event import DeviceEvent
from pdserve.base.ids import BlockId
from pdserve.base.tasks import service_group


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slice:
    """One group of layers of adjacent blocks."""

    block_ids: Sequence[BlockId]
    group: int
    #: Event after which the device has stored it; None: it is stored.
    after: DeviceEvent | None


class Pusher:
    """The queue between a prompt's steps and its transfer. Belongs to the event loop."""

    def __init__(self, transfer: OutgoingTransfer, ticket: Ticket, *, num_prompt_tokens: int) -> None:
        self.transfer = transfer
        self._groups = ticket.groups
        self._block_size = ticket.layout.block_size
        self._bundle_blocks = ticket.bundle_blocks
        self._num_prompt_tokens = num_prompt_tokens
        self._end = ticket.end
        #: Index of the first block of the prompt that is sent, by KV group.
        self._first_blocks = ticket.first_blocks
        #: Index of the first block that still has to be queued, by layer group.
        self._next_block = [ticket.first_blocks[kv_group] for kv_group in self._groups.kv_groups]
        #: The first of them is being sent.
        self._slices: deque[_Slice] = deque()
        self._more = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def is_idle(self) -> bool:
        """Whether all that was stored is on the wire."""
        return self._idle.is_set()

    def stored(
        self,
        block_tables: Sequence[Sequence[BlockId]],
        num_tokens: int,
        *,
        num_layers: int | None = None,
        after: DeviceEvent | None = None,
    ) -> None:
        """Queue what is complete: the first `num_layers` layers of the prompt's first `num_tokens` tokens are stored.

        Without `num_layers` all layers are; with `after` they will be once that event has happened. `block_tables`: of
        each KV group; entries before the ticket's first block do not matter.
        """
        num_blocks, groups = self._complete_blocks(num_tokens), self._groups
        stops = [self._whole_bundles(num_blocks, first) for first in self._first_blocks]
        for group in range(groups.count) if num_layers is None else groups.completed_by(num_layers):
            kv_group, first = groups.kv_groups[group], self._next_block[group]
            stop = stops[kv_group]
            if stop > first:
                block_ids = block_tables[kv_group][first:stop]
                self._slices.append(_Slice(block_ids=block_ids, group=group, after=after))
                self._next_block[group] = stop
                self._idle.clear()
                self._more.set()

    def _complete_blocks(self, num_tokens: int) -> int:
        """Blocks that get no more tokens: full ones, and the prompt's last."""
        is_whole_prompt = num_tokens >= self._num_prompt_tokens
        return -(-num_tokens // self._block_size) if is_whole_prompt else num_tokens // self._block_size

    def _whole_bundles(self, num_blocks: int, first_block: int) -> int:
        """The last bundle may be cut short; the others leave when all of their blocks are complete."""
        if num_blocks >= self._end:
            return self._end
        return num_blocks - max(0, num_blocks - first_block) % self._bundle_blocks

    async def run(self) -> None:
        """Sends until it is cancelled. Raises what `OutgoingTransfer.push` does."""
        while True:
            while self._slices:
                head = self._slices[0]
                await self.transfer.push(head.block_ids, group=head.group, after=head.after)
                self._slices.popleft()
            self._idle.set()
            self._more.clear()
            await self._more.wait()

    async def drained(self) -> None:
        """Returns when all that was stored is on the wire."""
        await self._idle.wait()


@asynccontextmanager
async def pushing(transfer: OutgoingTransfer, ticket: Ticket, *, num_prompt_tokens: int) -> AsyncIterator[Pusher]:
    """A pusher that runs until the block is left. When it fails, the block is cancelled and its error raised."""
    pusher = Pusher(transfer, ticket, num_prompt_tokens=num_prompt_tokens)
    try:
        async with service_group() as tasks:
            tasks.start(pusher.run(), name="push")
            yield pusher
    except ExceptionGroup as both:  # The block failed when it was to be cancelled.
        raise both.exceptions[0] from None
