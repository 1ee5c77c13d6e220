"""Blocks that transports cannot reach, as those on a GPU, stop over in a bounded piece of host memory."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from kvtransfer.transport import Buffer
from pdserve.base.errors import NoFreeBlocks
from pdserve.base.ids import BlockId


class RemoteBlocks(Protocol):
    """Blocks in another memory."""

    def read_block(self, block_id: BlockId, into: Buffer) -> None:
        """Copies the block's bytes, `[block_bytes]` uint8; they are there when it returns."""

    def write_block(self, block_id: BlockId, data: Buffer) -> None:
        """Copies bytes to the block; whatever uses the block after it returns finds them."""


class Staged:
    """Implements `BlockMemory`: blocks are copied to or from slots of the stage. Belongs to one event loop."""

    def __init__(self, blocks: RemoteBlocks, stage: Buffer, block_bytes: int) -> None:
        """`stage`: host memory, uint8, from which a device copies fast; it is divided into slots of `block_bytes`."""
        self._blocks = blocks
        self.most = len(stage) // block_bytes
        self._free = [stage[slot * block_bytes : (slot + 1) * block_bytes] for slot in range(self.most)]
        self._lent: dict[int, Buffer] = {}
        self._waiting: deque[tuple[int, asyncio.Future[list[Buffer]]]] = deque()

    @property
    def num_free(self) -> int:
        """Slots that nobody has."""
        return len(self._free)

    async def lend(self, block_ids: Sequence[BlockId]) -> list[Buffer]:
        count = len(block_ids)
        if count > self.most:
            raise NoFreeBlocks(
                f"{count} KV blocks at a time do not fit into the memory in which they stop over between GPU and wire, "
                f"which has room for {self.most}. Raise --staging-memory."
            )
        if not self._waiting and count <= len(self._free):
            return self._take(count)
        turn: asyncio.Future[list[Buffer]] = asyncio.get_running_loop().create_future()
        self._waiting.append((count, turn))
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                for buffer in turn.result():
                    self.give_back(buffer)
            else:  # Those behind it may have been waiting for it alone.
                self._serve()
            raise

    def load(self, block_id: BlockId, buffer: Buffer) -> None:
        self._blocks.read_block(block_id, buffer)

    def store(self, block_id: BlockId, buffer: Buffer) -> None:
        self._blocks.write_block(block_id, buffer)

    def give_back(self, buffer: Buffer) -> None:
        self._free.append(self._lent.pop(id(buffer)))
        self._serve()

    def _take(self, count: int) -> list[Buffer]:
        taken = [self._free.pop() for _ in range(count)]
        self._lent.update((id(buffer), buffer) for buffer in taken)
        return taken

    def _serve(self) -> None:
        """Those who wait, in turn, as far as there is room."""
        while self._waiting and (self._waiting[0][1].done() or self._waiting[0][0] <= len(self._free)):
            count, turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(self._take(count))
