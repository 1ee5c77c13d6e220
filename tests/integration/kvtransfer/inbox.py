"""An inbox of tests: notes what arrives, and receives it at once where it was told the size."""

from __future__ import annotations

import asyncio

import numpy as np

from kvtransfer.transport import Buffer, Operation, Transport
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
