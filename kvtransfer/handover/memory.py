"""The memory of blocks as the handover sees it: bytes that transports read and write."""

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
from pdserve.base.layout import KvLayout

#: Bytes of one transfer on the wire: enough to keep a fast wire busy, few enough that other transfers soon get a turn.
#: Copies within a GPU are faster.
HOST_WINDOW_BYTES, DEVICE_WINDOW_BYTES = 32 << 20, 256 << 20

#: Blocks that travel together, in order.
Bundle = Sequence[BlockId]


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageSpec:
    """One message of each bundle: which layers it has, and how it is digested."""

    #: Counted within the KV group.
    layers: slice
    digest: MessageDigest
    #: KV group of the blocks.
    kv_group: int = 0
    #: Event after which the blocks hold these layers; None: they hold them now.
    after: DeviceEvent | None = None


class BlockMemory(Protocol):
    """The engine's KV storage, seen as bytes. Belongs to one event loop."""

    @property
    def max_blocks(self) -> int:
        """Number of blocks that can be lent at a time."""

    @property
    def bundle_blocks(self) -> int:
        """Number of blocks best received together. A smaller bundle takes as much of `max_blocks` as a full one."""

    @property
    def copies(self) -> bool:
        """Whether blocks are copied. If not, a bundle of one block is lent the block itself, and nothing is stored."""

    @property
    def digest(self) -> str:
        """Kind of the messages' digests, one of `DIGESTS`."""

    @property
    def window_bytes(self) -> int:
        """Bytes of one transfer that may be on the wire at a time."""

    def try_lend(self, bundle: Bundle) -> Buffer | None:
        """What `lend` returns for one bundle, or None when that would wait."""

    async def lend(self, bundles: Sequence[Bundle]) -> list[Buffer]:
        """Memory for these bundles, uint8 [blocks * block_bytes] each. The caller gives every buffer back.

        Waits, first come first served, while other transfers hold too much of it. Each of them ends with its lease,
        which may be kept for long: a caller that may have to leave cancels the wait.

        Raises: NoFreeBlocks for more than `max_blocks`.
        """

    async def load(self, bundles: Sequence[Bundle], buffers: Sequence[Buffer], spec: MessageSpec) -> list[bytes]:
        """Copies the messages that `spec` describes from the bundles' blocks to their buffers.

        Returns the messages' digests if it copies, else nothing: the caller then digests the messages it sends.
        Raises: TransferError.
        """

    async def store(self, bundles: Sequence[Bundle], buffers: Sequence[Buffer], spec: MessageSpec) -> list[bytes]:
        """Copies the messages from the buffers to the bundles' blocks. Otherwise like `load`."""

    def give_back(self, buffer: Buffer) -> None:
        """Takes a lent buffer back: nothing reads or writes it any more."""


class HostBlocks(Protocol):
    """Blocks in host memory."""

    def block_bytes_view(self, block_id: BlockId) -> Buffer:
        """The block's bytes, `[block_bytes]` uint8, writable, without a copy. The memory outlives every transfer."""
        ...


class InPlaceMemory:
    """Implements `BlockMemory`: transports read and write the blocks themselves.

    Only bundles of several blocks, which a worker on a GPU may ask for, are gathered in memory of their own to be sent.
    """

    max_blocks = sys.maxsize
    bundle_blocks = 1
    copies = False
    digest = HOST_DIGEST
    window_bytes = HOST_WINDOW_BYTES

    def __init__(self, blocks: HostBlocks, layout: KvLayout) -> None:
        self._blocks = blocks
        self._layout = layout

    def try_lend(self, bundle: Bundle) -> Buffer:
        first = self._blocks.block_bytes_view(bundle[0])
        return first if len(bundle) == 1 else np.empty(len(bundle) * first.nbytes, np.uint8)

    async def lend(self, bundles: Sequence[Bundle]) -> list[Buffer]:
        return [self.try_lend(bundle) for bundle in bundles]

    async def load(self, bundles: Sequence[Bundle], buffers: Sequence[Buffer], spec: MessageSpec) -> list[bytes]:
        assert spec.after is None, "blocks in host memory are computed before they are reported"
        for bundle, buffer in zip(bundles, buffers, strict=True):
            if len(bundle) > 1:
                self._gather(bundle, buffer, spec)
        return []

    async def store(self, bundles: Sequence[Bundle], buffers: Sequence[Buffer], spec: MessageSpec) -> list[bytes]:
        return []

    def give_back(self, buffer: Buffer) -> None:
        pass

    def _gather(self, bundle: Bundle, buffer: Buffer, spec: MessageSpec) -> None:
        num_layers = self._layout.groups[spec.kv_group].num_layers
        rows = buffer[span_of(spec.layers, num_layers, buffer.nbytes)].reshape(len(bundle), -1)
        block_span = span_of(spec.layers, num_layers, buffer.nbytes // len(bundle))
        for row, block_id in zip(rows, bundle, strict=True):
            row[:] = self._blocks.block_bytes_view(block_id)[block_span]
