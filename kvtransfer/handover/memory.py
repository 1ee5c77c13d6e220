"""The memory of blocks as the handover sees it: bytes that transports read and write."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvtransfer.handover.digest import HOST_DIGEST, MessageDigest
from kvtransfer.handover.layer_groups import span_of
from kvtransfer.transport import Buffer
from kvtransfer.transport.path import DataEndpoint
from pdserve.base.device_event import DeviceEvent
from pdserve.base.ids import BlockId
from pdserve.base.layout import KvLayout
from pdserve.base.shared_memory import ShareableMemory

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


class Digests(Protocol):
    """Digests of messages that a device still computes, perhaps."""

    async def found(self) -> list[bytes]:
        """The digests, in the order of the messages. Raises: TransferError."""


class PreparedBlocks(Protocol):
    """Messages in memory from which another process copies them."""

    @property
    def starts(self) -> npt.NDArray[np.int64]:
        """Where they begin in the memory, for each of their blocks in order: int64 [blocks]."""

    async def digests(self) -> Digests:
        """Starts to compute their digests, once they were offered. Raises: TransferError."""

    def release(self) -> None:
        """The other process copies them no more."""


@dataclass(frozen=True, slots=True)
class UncopiedBlocks:
    """Implements `PreparedBlocks`: the blocks themselves are offered."""

    starts: npt.NDArray[np.int64]
    find_digests: Callable[[], Awaitable[Digests]]

    async def digests(self) -> Digests:
        return await self.find_digests()

    def release(self) -> None:
        """Nothing was taken."""


class OfferSource(Protocol):
    """Memory in which a worker's blocks are offered. Belongs to one event loop."""

    @property
    def shared(self) -> ShareableMemory:
        """The memory."""

    @property
    def run_bytes(self) -> tuple[int, int]:
        """Bytes that are best offered together: at first, so that the receiver starts soon, and at most."""

    @property
    def is_bounded(self) -> bool:
        """Whether `prepare` waits, first come first served, while other transfers have filled the memory."""

    async def open(self) -> None:
        """To be called before the memory is shown to another process. Raises: SetupError."""

    async def prepare(self, bundles: Sequence[Bundle], spec: MessageSpec) -> PreparedBlocks:
        """The bundles' messages, once the blocks hold their layers. The caller releases them. Raises: TransferError."""


class OfferedMemory(Protocol):
    """Blocks that processes of the same host copy from each other, without sending them. Belongs to one event loop."""

    @property
    def memories(self) -> Sequence[ShareableMemory]:
        """Those of its sources; empty: the blocks can only be copied into."""

    def sources_for(self, end: DataEndpoint) -> Sequence[OfferSource]:
        """Those from which the worker at that end should be able to copy, fastest first."""

    def block_bytes(self, spec: MessageSpec) -> int:
        """Bytes that a block has in the messages that `spec` describes."""

    async def pull(
        self, source: Buffer, starts: npt.NDArray[np.int64], bundles: Sequence[Bundle], spec: MessageSpec
    ) -> list[bytes]:
        """Copies the blocks' bytes from `starts` in another process's memory; returns the digests of what was copied.

        Nothing is read or written any more when it ends, even cancelled. Raises: TransferError.
        """


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

    @property
    def offers(self) -> OfferedMemory | None:
        """The blocks for processes of the same host; None: they are sent as to any other host."""

    def try_lend(self, bundle: Bundle) -> Buffer | None:
        """What `lend` returns for one bundle, or None when that would wait."""

    async def lend(self, bundles: Sequence[Bundle], *, to_send: bool = False) -> list[Buffer]:
        """Memory for these bundles, uint8 [blocks * block_bytes] each. The caller gives every buffer back.

        What is lent `to_send` leaves some for messages that arrive: two workers that send to each other would otherwise
        wait for each other.

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


class InPlaceMemory:
    """Implements `BlockMemory`: transports read and write the blocks themselves.

    Only bundles of several blocks, which a worker on a GPU may ask for, are gathered in memory of their own to be sent.
    """

    max_blocks = sys.maxsize
    bundle_blocks = 1
    copies = False
    digest = HOST_DIGEST
    window_bytes = HOST_WINDOW_BYTES

    def __init__(self, blocks: Buffer, layout: KvLayout, offers: OfferedMemory | None = None) -> None:
        """`blocks`: all of them, uint8 [num_blocks * block_bytes], writable. It outlives every transfer."""
        self._blocks = blocks.reshape(-1, layout.block_bytes)
        self._layout = layout
        self.offers = offers

    def try_lend(self, bundle: Bundle) -> Buffer:
        first: Buffer = self._blocks[bundle[0]]
        return first if len(bundle) == 1 else np.empty(len(bundle) * first.nbytes, np.uint8)

    async def lend(self, bundles: Sequence[Bundle], *, to_send: bool = False) -> list[Buffer]:
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
            row[:] = self._blocks[block_id, block_span]
