"""Inboxes of tests, which note what arrives and what is offered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np

from kvtransfer.transport import Buffer, Operation, Transport
from kvtransfer.transport.base import Inbox
from kvtransfer.transport.local.offer import Offer
from kvtransfer.transport.offers import IncomingOffer
from pdserve.base.errors import PdserveError


class NotingInbox:
    """Implements `Inbox` for the tags from `base`, for messages of `num_bytes`."""

    def __init__(self, transport: Transport, base: int, num_bytes: int, *, receives: bool = True) -> None:
        """Without `receives`, messages wait for `post`."""
        self._transport = transport
        self._num_bytes = num_bytes
        self._receives = receives
        #: Tags that are not wanted.
        self.unwanted: set[int] = set()
        self.posted: dict[int, Operation] = {}
        self.waiting: list[int] = []
        self.errors: list[PdserveError] = []
        self._changed = asyncio.Event()
        transport.expect(base, self)

    def arrived(self, tag: int) -> bool:
        if tag in self.unwanted:
            return False
        self.waiting.append(tag)
        if self._receives:
            self.post(tag)
        self._changed.set()
        return True

    def offered(self, blocks: IncomingOffer) -> bool:
        raise AssertionError("nothing is offered")

    def lost(self, error: PdserveError) -> None:
        self.errors.append(error)

    def post(self, tag: int) -> Operation:
        """Receives a message that waits."""
        self.waiting.remove(tag)
        buffer: Buffer = np.zeros(self._num_bytes, np.uint8)
        self.posted[tag] = self._transport.post_receive(tag, buffer)
        return self.posted[tag]

    async def until_arrived(self, num_messages: int) -> None:
        """Returns when so many have arrived."""
        while len(self.waiting) + len(self.posted) < num_messages:
            self._changed.clear()
            await self._changed.wait()


class CopyingInbox:
    """Implements `Inbox` for offers of one block to the tags from `base`: copies it, at once or with `copy`."""

    def __init__(self, expect: Callable[[int, Inbox], None], base: int = 0, *, copies: bool = True) -> None:
        """`expect`: opens the inbox."""
        self._copies = copies
        self.held: dict[int, IncomingOffer] = {}
        self.copied: dict[int, Buffer] = {}
        self._changed = asyncio.Event()
        expect(base, self)

    def arrived(self, tag: int) -> bool:
        raise AssertionError("nothing is sent")

    def lost(self, error: PdserveError) -> None:
        """Nothing more comes."""

    def offered(self, blocks: IncomingOffer) -> bool:
        self.held[blocks.offer.first_tag] = blocks
        if self._copies:
            self.copy(blocks.offer.first_tag)
        self._changed.set()
        return True

    def copy(self, tag: int) -> None:
        """Copies what was offered, and lets the sender go."""
        blocks = self.held.pop(tag)
        start = int(blocks.offer.starts[0])
        self.copied[tag] = blocks.memory[start : start + blocks.offer.block_bytes].copy()
        blocks.end()

    async def until_offered(self, num_offers: int) -> None:
        """Returns when so many have come."""
        while len(self.held) + len(self.copied) < num_offers:
            self._changed.clear()
            await self._changed.wait()


def one_block(tag: int, start: int, num_bytes: int) -> Offer:
    """A message of one block."""
    return Offer(first_tag=tag, tag_step=1, num_messages=1, block_bytes=num_bytes, starts=np.array([start], np.int64))
