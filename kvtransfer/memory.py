"""Where blocks live, as far as moving them is concerned: host memory that transports read and write."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Protocol

from kvtransfer.transport import Buffer
from pdserve.base.ids import BlockId
from pdserve.base.moment import Moment


class BlockMemory(Protocol):
    """The engine's KV storage, seen as bytes. Belongs to one event loop."""

    @property
    def most(self) -> int:
        """So many blocks can be lent at a time."""

    @property
    def copies(self) -> bool:
        """False: what is lent are the blocks themselves, so there is nothing to load and to store."""

    async def lend(self, block_ids: Sequence[BlockId]) -> list[Buffer]:
        """Host memory for these blocks, `[block_bytes]` uint8 each; every one is to be given back.

        Waits, first come first served, while others have too much of it. Raises `NoFreeBlocks` for more than `most`.
        """

    async def load(
        self, block_ids: Sequence[BlockId], buffers: Sequence[Buffer], layers: slice, after: Moment | None
    ) -> None:
        """Has the bytes of the blocks' layers, as they are `after`, in their place in the memory lent for the blocks.

        Raises `TransferError` when it cannot.
        """

    async def store(self, block_ids: Sequence[BlockId], buffers: Sequence[Buffer], layers: slice) -> None:
        """Has in the blocks' layers what is in their place in the memory lent for them.

        Raises `TransferError` when it cannot.
        """

    def give_back(self, buffer: Buffer) -> None:
        """Nothing reads or writes it any more."""


class HostBlocks(Protocol):
    """Blocks in host memory."""

    def block_bytes_view(self, block_id: BlockId) -> Buffer:
        """The block's bytes, `[block_bytes]` uint8, writable, without a copy. The memory outlives every transfer."""
        ...


class InPlace:
    """Implements `BlockMemory`: transports read and write the blocks themselves."""

    most = sys.maxsize
    copies = False

    def __init__(self, blocks: HostBlocks) -> None:
        self._blocks = blocks

    async def lend(self, block_ids: Sequence[BlockId]) -> list[Buffer]:
        return [self._blocks.block_bytes_view(block_id) for block_id in block_ids]

    async def load(
        self, block_ids: Sequence[BlockId], buffers: Sequence[Buffer], layers: slice, after: Moment | None
    ) -> None:
        assert after is None, "what computes in host memory has computed when it says so"

    async def store(self, block_ids: Sequence[BlockId], buffers: Sequence[Buffer], layers: slice) -> None:
        pass

    def give_back(self, buffer: Buffer) -> None:
        pass
