"""The stage: bounded memory that transports can reach, for blocks that they cannot, as those on a GPU."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from kvtransfer.handover.digest import HOST_DIGEST
from kvtransfer.handover.memory import DEVICE_WINDOW_BYTES, HOST_WINDOW_BYTES, Bundle, MessageSpec, OfferedMemory
from kvtransfer.transport import Buffer
from pdserve.base.errors import NoFreeBlocks

#: Bytes of a bundle: large enough that the wire costs more than the work per message, small enough to leave soon.
_BUNDLE_BYTES = 32 << 20
_MAX_BUNDLE_BLOCKS = 16


def best_bundle_blocks(block_bytes: int) -> int:
    """Blocks per bundle for blocks of this size; workers with the same model agree on it."""
    return max(1, min(_MAX_BUNDLE_BLOCKS, _BUNDLE_BYTES // block_bytes))


class BlockCopies(Protocol):
    """Copies blocks between another memory and the stage.

    When a call ends, even cancelled, its copies no longer touch blocks or stage.
    """

    @property
    def digest(self) -> str:
        """Kind of the digests, one of `DIGESTS`."""

    async def read(self, bundles: Sequence[Bundle], slots: Sequence[int], spec: MessageSpec) -> list[bytes]:
        """Copies the layers of each bundle to its message in the stage. `slots`: the first slot of each bundle.

        The bytes are in the stage when it returns. Returns the messages' digests. Raises: TransferError.
        """

    async def write(self, bundles: Sequence[Bundle], slots: Sequence[int], spec: MessageSpec) -> list[bytes]:
        """Copies in the other direction; later uses of the blocks see the bytes. Otherwise like `read`."""


_Waiting = deque[tuple[list[int], asyncio.Future[list[Buffer]]]]


class StagedMemory:
    """Implements `BlockMemory`: bundles are copied to or from frames of the stage, each of a full bundle's size.

    Belongs to one event loop.
    """

    copies = True

    def __init__(
        self,
        copies: BlockCopies,
        stage: Buffer,
        block_bytes: int,
        bundle_blocks: int | None = None,
        offers: OfferedMemory | None = None,
    ) -> None:
        """`stage`: uint8, memory to and from which a device copies fast; it is divided into slots of `block_bytes`.

        `bundle_blocks` is by default `best_bundle_blocks`, which the stages of both workers must hold. `offers`: the
        blocks themselves, for processes of the host; they need no stage.
        """
        self.offers = offers
        self._copies = copies
        self._stage = stage
        self._block_bytes = block_bytes
        self.bundle_blocks = bundle_blocks or best_bundle_blocks(block_bytes)
        #: First slots of free frames.
        self._free = [*range(0, len(stage) // block_bytes - self.bundle_blocks + 1, self.bundle_blocks)]
        assert self._free
        self.max_blocks = len(self._free) * self.bundle_blocks
        self.digest = copies.digest
        self.window_bytes = HOST_WINDOW_BYTES if copies.digest == HOST_DIGEST else DEVICE_WINDOW_BYTES
        #: Lent buffers and their first slots, by the identity of the buffer.
        self._lent: dict[int, tuple[Buffer, int]] = {}
        #: Frames that only messages which arrive take; they wait for nothing but their copies.
        self._kept = min(1, len(self._free) - 1)
        #: Bundle sizes in blocks, and the buffers when they are there, in the order of the calls: for messages that
        #: arrive, and for those to be sent.
        self._waiting: tuple[_Waiting, _Waiting] = (deque(), deque())

    @property
    def num_free(self) -> int:
        """Blocks that fit into the free frames."""
        return len(self._free) * self.bundle_blocks

    def try_lend(self, bundle: Bundle) -> Buffer | None:
        if self._waiting[False] or not self._free:
            return None
        return self._take([len(bundle)])[0]

    async def lend(self, bundles: Sequence[Bundle], *, to_send: bool = False) -> list[Buffer]:
        sizes = [len(bundle) for bundle in bundles]
        num_frames = self.max_blocks // self.bundle_blocks - to_send * self._kept
        if len(sizes) > num_frames or max(sizes, default=0) > self.bundle_blocks:
            raise NoFreeBlocks(
                f"{len(sizes)} bundles of up to {max(sizes)} KV blocks do not fit into the memory between GPU and "
                f"wire, which holds {num_frames} bundles of {self.bundle_blocks}. Raise --staging-memory."
            )
        waiting = self._waiting[to_send]
        if not waiting and self._has(len(sizes), to_send=to_send):
            return self._take(sizes)
        lent: asyncio.Future[list[Buffer]] = asyncio.get_running_loop().create_future()
        waiting.append((sizes, lent))
        try:
            return await lent
        except asyncio.CancelledError:
            if lent.done() and not lent.cancelled():
                for buffer in lent.result():
                    self.give_back(buffer)
            else:  # Later callers may have waited only for this one.
                self._serve_waiting()
            raise

    async def load(self, bundles: Sequence[Bundle], buffers: Sequence[Buffer], spec: MessageSpec) -> list[bytes]:
        return await self._copies.read(bundles, self._slots_of(buffers), spec)

    async def store(self, bundles: Sequence[Bundle], buffers: Sequence[Buffer], spec: MessageSpec) -> list[bytes]:
        return await self._copies.write(bundles, self._slots_of(buffers), spec)

    def give_back(self, buffer: Buffer) -> None:
        self._free.append(self._lent.pop(id(buffer))[1])
        self._serve_waiting()

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

    def _has(self, num_frames: int, *, to_send: bool) -> bool:
        return num_frames <= len(self._free) - to_send * self._kept

    def _serve_waiting(self) -> None:
        """Lends to waiting callers in order, while frames are free."""
        for to_send in (False, True):
            waiting = self._waiting[to_send]
            while waiting and (waiting[0][1].done() or self._has(len(waiting[0][0]), to_send=to_send)):
                sizes, lent = waiting.popleft()
                if not lent.done():
                    lent.set_result(self._take(sizes))
