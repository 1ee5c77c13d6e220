"""Where blocks live, as far as moving them is concerned: memory that transports read and write."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvtransfer.handover.digest import HOST_DIGEST, MessageDigest
from kvtransfer.handover.layer_groups import span_of
from kvtransfer.transport import Buffer
from pdserve.base.device_event import DeviceEvent
from pdserve.base.ids import BlockId

#: Enough to keep a fast wire busy, little enough that another transfer gets its turn soon. Within a GPU all is faster.
HOST_WINDOW_BYTES, DEVICE_WINDOW_BYTES = 32 << 20, 256 << 20

#: Blocks that travel together, in order.
Bundle = Sequence[BlockId]


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageSpec:
    """What is loaded or stored of bundles: one message of each."""

    layers: slice
    digest: MessageDigest
    #: The blocks have these layers then; None: they have them.
    after: DeviceEvent | None = None


class BlockMemory(Protocol):
    """The engine's KV storage, seen as bytes. Belongs to one event loop."""

    @property
    def max_blocks(self) -> int:
        """So many blocks can be lent at a time."""

    @property
    def bundle_blocks(self) -> int:
        """So many are best received together; fewer take as much room, of what `max_blocks` says there is."""

    @property
    def copies(self) -> bool:
        """False: what is lent for bundles of one block are the blocks themselves, and nothing has to be stored."""

    @property
    def digest(self) -> str:
        """Which one messages have."""

    @property
    def window_bytes(self) -> int:
        """As much of a transfer may be on the wire at a time."""

    async def lend(self, bundles: Sequence[Bundle]) -> list[Buffer]:
        """Memory for these bundles, uint8 [blocks * block_bytes] each; every one is to be given back.

        Waits, first come first served, while other transfers hold too much of it.

        Raises: NoFreeBlocks for more than `max_blocks`.
        """

    async def load(self, bundles: Sequence[Bundle], buffers: Sequence[Buffer], spec: MessageSpec) -> list[bytes]:
        """Has that part of the bundles in its place in the memory lent for them.

        Gives the messages' digests where it copies, else nothing: then bytes are digested as they pass. Raises
        `TransferError`.
        """

    async def store(self, bundles: Sequence[Bundle], buffers: Sequence[Buffer], spec: MessageSpec) -> list[bytes]:
        """Has in the bundles' blocks what is in its place in the memory lent for them. Else as `load`."""

    def give_back(self, buffer: Buffer) -> None:
        """Nothing reads or writes it any more."""


class HostBlocks(Protocol):
    """Blocks in host memory."""

    def block_bytes_view(self, block_id: BlockId) -> Buffer:
        """The block's bytes, `[block_bytes]` uint8, writable, without a copy. The memory outlives every transfer."""
        ...


class InPlaceMemory:
    """Implements `BlockMemory`: transports read and write the blocks themselves.

    Only larger bundles, which a worker on a GPU may ask for, are put together in memory of their own to be sent.
    """

    max_blocks = sys.maxsize
    bundle_blocks = 1
    copies = False
    digest = HOST_DIGEST
    window_bytes = HOST_WINDOW_BYTES

    def __init__(self, blocks: HostBlocks, num_layers: int) -> None:
        self._blocks = blocks
        self._num_layers = num_layers

    async def lend(self, bundles: Sequence[Bundle]) -> list[Buffer]:
        return [self._lend(bundle) for bundle in bundles]

    async def load(self, bundles: Sequence[Bundle], buffers: Sequence[Buffer], spec: MessageSpec) -> list[bytes]:
        assert spec.after is None, "what computes in host memory has computed when it says so"
        for bundle, buffer in zip(bundles, buffers, strict=True):
            if len(bundle) > 1:
                self._gather(bundle, buffer, spec.layers)
        return []

    async def store(self, bundles: Sequence[Bundle], buffers: Sequence[Buffer], spec: MessageSpec) -> list[bytes]:
        return []

    def give_back(self, buffer: Buffer) -> None:
        pass

    def _lend(self, bundle: Bundle) -> Buffer:
        first = self._blocks.block_bytes_view(bundle[0])
        return first if len(bundle) == 1 else np.empty(len(bundle) * first.nbytes, np.uint8)

    def _gather(self, bundle: Bundle, buffer: Buffer, layers: slice) -> None:
        there = buffer[span_of(layers, self._num_layers, buffer.nbytes)].reshape(len(bundle), -1)
        of_block = span_of(layers, self._num_layers, buffer.nbytes // len(bundle))
        for row, block_id in enumerate(bundle):
            there[row] = self._blocks.block_bytes_view(block_id)[of_block]
