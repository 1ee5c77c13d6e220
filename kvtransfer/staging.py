"""Blocks that transports cannot reach, as those on a GPU, stop over in a bounded piece of memory that they can."""

from __future__ import annotations

import asyncio
from bisect import insort
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from kvtransfer.memory import Bundle, Part
from kvtransfer.transport import Buffer
from pdserve.base.errors import NoFreeBlocks

#: A message should be large enough for the wire to cost more than what is done for it, and small enough to leave soon.
_BUNDLE_BYTES = 32 << 20
_MOST_BUNDLE_BLOCKS = 16


def best_bundle(block_bytes: int) -> int:
    """Blocks that travel together: the same for all workers that have the same blocks."""
    return max(1, min(_MOST_BUNDLE_BLOCKS, _BUNDLE_BYTES // block_bytes))


class BlockCopies(Protocol):
    """Copies blocks between another memory and the stage.

    However a call ends, cancelled too, nothing of it touches blocks or stage any more.
    """

    @property
    def digest(self) -> str:
        """As `BlockMemory.digest`."""

    async def read(self, bundles: Sequence[Bundle], slots: Sequence[int], part: Part) -> list[bytes]:
        """Copies that part of each bundle to its place in the slots from the given one on, as many as it has blocks.

        It is there when it returns. Gives digests as `BlockMemory.load`. Raises `TransferError`.
        """

    async def write(self, bundles: Sequence[Bundle], slots: Sequence[int], part: Part) -> list[bytes]:
        """The other way round; whatever uses the blocks after it returns finds them."""


class Staged:
    """Implements `BlockMemory`: bundles are copied to or from neighbouring slots of the stage, one for each block.

    Belongs to one event loop.
    """

    copies = True

    def __init__(self, copies: BlockCopies, stage: Buffer, block_bytes: int, bundle_blocks: int | None = None) -> None:
        """`stage`: uint8, memory from which a device copies fast; it is divided into slots of `block_bytes`.

        `bundle_blocks`: None: as `best_bundle`, which both ends of a transfer have to have room for.
        """
        self._copies = copies
        self._stage = stage
        self._block_bytes = block_bytes
        self.most = len(stage) // block_bytes
        self.bundle_blocks = bundle_blocks or best_bundle(block_bytes)
        assert self.bundle_blocks <= self.most
        self.digest = copies.digest
        #: Free runs of slots, first and number, ascending; neighbours are one run.
        self._free = [(0, self.most)]
        #: What is lent, by identity, with its first slot.
        self._lent: dict[int, tuple[Buffer, int]] = {}
        self._waiting: deque[tuple[list[int], asyncio.Future[list[Buffer]]]] = deque()

    @property
    def num_free(self) -> int:
        """Slots that nobody has."""
        return sum(length for _, length in self._free)

    async def lend(self, bundles: Sequence[Bundle]) -> list[Buffer]:
        sizes = [len(bundle) for bundle in bundles]
        if sum(sizes) > self.most:
            raise NoFreeBlocks(
                f"{sum(sizes)} KV blocks at a time do not fit into the memory in which they stop over between GPU and "
                f"wire, which has room for {self.most}. Raise --staging-memory."
            )
        if not self._waiting and (taken := self._take(sizes)) is not None:
            return taken
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

    async def load(self, bundles: Sequence[Bundle], buffers: Sequence[Buffer], part: Part) -> list[bytes]:
        return await self._copies.read(bundles, self._slots_of(buffers), part)

    async def store(self, bundles: Sequence[Bundle], buffers: Sequence[Buffer], part: Part) -> list[bytes]:
        return await self._copies.write(bundles, self._slots_of(buffers), part)

    def give_back(self, buffer: Buffer) -> None:
        buffer, first = self._lent.pop(id(buffer))
        self._release(first, buffer.nbytes // self._block_bytes)
        self._serve()

    def _slots_of(self, buffers: Sequence[Buffer]) -> list[int]:
        return [self._lent[id(buffer)][1] for buffer in buffers]

    def _take(self, sizes: Sequence[int]) -> list[Buffer] | None:
        """Room for each, or None when there is not enough for all, or only in pieces."""
        firsts: list[int] = []
        for size in sizes:
            place = next((place for place, (_, length) in enumerate(self._free) if length >= size), None)
            if place is None:
                for taken, given in zip(firsts, sizes, strict=False):
                    self._release(taken, given)
                return None
            first, length = self._free[place]
            self._free[place : place + 1] = [(first + size, length - size)] if length > size else []
            firsts.append(first)
        lent = []
        for first, size in zip(firsts, sizes, strict=True):
            buffer = self._stage[first * self._block_bytes : (first + size) * self._block_bytes]
            self._lent[id(buffer)] = (buffer, first)
            lent.append(buffer)
        return lent

    def _release(self, first: int, length: int) -> None:
        insort(self._free, (first, length))
        merged: list[tuple[int, int]] = []
        for start, size in self._free:
            if merged and sum(merged[-1]) == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                merged.append((start, size))
        self._free = merged

    def _serve(self) -> None:
        """Those who wait, in turn, as far as there is room."""
        while self._waiting:
            sizes, turn = self._waiting[0]
            taken = None if turn.done() else self._take(sizes)
            if taken is None and not turn.done():
                return
            self._waiting.popleft()
            if taken is not None:
                turn.set_result(taken)
