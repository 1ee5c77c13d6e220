"""Blocks that transports cannot reach, as those on a GPU, stop over in a bounded piece of memory that they can."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from kvtransfer.handover.digest import HOST_DIGEST
from kvtransfer.handover.memory import DEVICE_WINDOW_BYTES, HOST_WINDOW_BYTES, Bundle, MessageSpec
from kvtransfer.transport import Buffer
from pdserve.base.errors import NoFreeBlocks

#: A message should be large enough for the wire to cost more than what is done for it, and small enough to leave soon.
_BUNDLE_BYTES = 32 << 20
_MAX_BUNDLE_BLOCKS = 16


def best_bundle_blocks(block_bytes: int) -> int:
    """Blocks that travel together: the same for all workers that have the same blocks."""
    return max(1, min(_MAX_BUNDLE_BLOCKS, _BUNDLE_BYTES // block_bytes))


class BlockCopies(Protocol):
    """Copies blocks between another memory and the stage.

    However a call ends, cancelled too, nothing of it touches blocks or stage any more.
    """

    @property
    def digest(self) -> str:
        """As `BlockMemory.digest`."""

    async def read(self, bundles: Sequence[Bundle], slots: Sequence[int], spec: MessageSpec) -> list[bytes]:
        """Copies that part of each bundle to its place in the slots from the given one on, as many as it has blocks.

        It is there when it returns. Gives the messages' digests. Raises `TransferError`.
        """

    async def write(self, bundles: Sequence[Bundle], slots: Sequence[int], spec: MessageSpec) -> list[bytes]:
        """The other way round; whatever uses the blocks after it returns finds them."""


class StagedMemory:
    """Implements `BlockMemory`: bundles are copied to or from frames of the stage, each with room for a whole one.

    Belongs to one event loop.
    """

    copies = True

    def __init__(self, copies: BlockCopies, stage: Buffer, block_bytes: int, bundle_blocks: int | None = None) -> None:
        """`stage`: uint8, memory from which a device copies fast; it is divided into slots of `block_bytes`.

        `bundle_blocks`: None: as `best_bundle_blocks`, which both ends of a transfer have to have room for.
        """
        self._copies = copies
        self._stage = stage
        self._block_bytes = block_bytes
        self.bundle_blocks = bundle_blocks or best_bundle_blocks(block_bytes)
        #: First slots.
        self._free = [*range(0, len(stage) // block_bytes - self.bundle_blocks + 1, self.bundle_blocks)]
        assert self._free
        self.max_blocks = len(self._free) * self.bundle_blocks
        self.digest = copies.digest
        self.window_bytes = HOST_WINDOW_BYTES if copies.digest == HOST_DIGEST else DEVICE_WINDOW_BYTES
        #: What is lent, by identity, with its first slot.
        self._lent: dict[int, tuple[Buffer, int]] = {}
        self._waiting: deque[tuple[list[int], asyncio.Future[list[Buffer]]]] = deque()

    @property
    def num_free(self) -> int:
        """Blocks for which there are frames that nobody has."""
        return len(self._free) * self.bundle_blocks

    async def lend(self, bundles: Sequence[Bundle]) -> list[Buffer]:
        sizes = [len(bundle) for bundle in bundles]
        num_frames = self.max_blocks // self.bundle_blocks
        if len(sizes) > num_frames or max(sizes, default=0) > self.bundle_blocks:
            raise NoFreeBlocks(
                f"{len(sizes)} bundles of up to {max(sizes)} KV blocks at a time do not fit into the memory in which "
                f"they stop over between GPU and wire, which has room for {num_frames} of {self.bundle_blocks}. "
                "Raise --staging-memory."
            )
        if not self._waiting and len(sizes) <= len(self._free):
            return self._take(sizes)
        turn: asyncio.Future[list[Buffer]] = asyncio.get_running_loop().create_future()
        self._waiting.append((sizes, turn))
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                for buffer in turn.result():
                    self.give_back(buffer)
            else:  # Those behind it may have been waiting for it alone.
                self._serve()
            raise

    async def load(self, bundles: Sequence[Bundle], buffers: Sequence[Buffer], spec: MessageSpec) -> list[bytes]:
        return await self._copies.read(bundles, self._slots_of(buffers), spec)

    async def store(self, bundles: Sequence[Bundle], buffers: Sequence[Buffer], spec: MessageSpec) -> list[bytes]:
        return await self._copies.write(bundles, self._slots_of(buffers), spec)

    def give_back(self, buffer: Buffer) -> None:
        self._free.append(self._lent.pop(id(buffer))[1])
        self._serve()

    def _slots_of(self, buffers: Sequence[Buffer]) -> list[int]:
        return [self._lent[id(buffer)][1] for buffer in buffers]

    def _take(self, sizes: Sequence[int]) -> list[Buffer]:
        lent = []
        for size in sizes:
            first = self._free.pop()
            buffer = self._stage[first * self._block_bytes : (first + size) * self._block_bytes]
            self._lent[id(buffer)] = (buffer, first)
            lent.append(buffer)
        return lent

    def _serve(self) -> None:
        """Those who wait, in turn, as far as there is room."""
        while self._waiting and (self._waiting[0][1].done() or len(self._waiting[0][0]) <= len(self._free)):
            sizes, turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(self._take(sizes))
