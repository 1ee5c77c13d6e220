"""Blocks that transports cannot reach, as those on a GPU, stop over in a bounded piece of host memory."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from kvtransfer.transport import Buffer
from pdserve.base.errors import NoFreeBlocks
from pdserve.base.ids import BlockId
from pdserve.base.moment import Moment


class BlockCopies(Protocol):
    """Copies blocks between another memory and the slots of a stage.

    However a call ends, cancelled too, nothing of it touches blocks or slots any more.
    """

    async def read(
        self, block_ids: Sequence[BlockId], slots: Sequence[int], layers: slice, after: Moment | None
    ) -> None:
        """Copies those layers of each block, as they are `after`, to their place in its slot.

        They are there when it returns. Raises `TransferError`.
        """

    async def write(self, block_ids: Sequence[BlockId], slots: Sequence[int], layers: slice) -> None:
        """Copies those layers from each slot to its block; whatever uses the block after it returns finds them.

        Raises `TransferError`.
        """


class Staged:
    """Implements `BlockMemory`: blocks are copied to or from slots of the stage. Belongs to one event loop."""

    copies = True

    def __init__(self, copies: BlockCopies, stage: Buffer, block_bytes: int) -> None:
        """`stage`: host memory, uint8, from which a device copies fast; it is divided into slots of `block_bytes`."""
        self._copies = copies
        self.most = len(stage) // block_bytes
        self._free = [stage[slot * block_bytes : (slot + 1) * block_bytes] for slot in range(self.most)]
        #: By identity: a slot is lent as the same object each time.
        self._slots = {id(buffer): slot for slot, buffer in enumerate(self._free)}
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

    async def load(
        self, block_ids: Sequence[BlockId], buffers: Sequence[Buffer], layers: slice, after: Moment | None
    ) -> None:
        await self._copies.read(block_ids, self._slots_of(buffers), layers, after)

    async def store(self, block_ids: Sequence[BlockId], buffers: Sequence[Buffer], layers: slice) -> None:
        await self._copies.write(block_ids, self._slots_of(buffers), layers)

    def give_back(self, buffer: Buffer) -> None:
        self._free.append(self._lent.pop(id(buffer)))
        self._serve()

    def _slots_of(self, buffers: Sequence[Buffer]) -> list[int]:
        return [self._slots[id(buffer)] for buffer in buffers]

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
