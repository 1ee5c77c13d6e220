"""KV blocks in GPU memory that are offered in host memory, to workers of the host that cannot read the GPU.

The sender's launch copies the blocks to memory that both processes have pinned, and finds the sums of their digests;
the receiver's launch copies them from there. An offer takes frames of that memory until it was copied.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from math import ceil

import numpy as np

from kvtransfer.handover.layer_groups import LayerGroups
from kvtransfer.handover.memory import Bundle, Digests, MessageSpec
from kvtransfer.transport import Buffer
from pdserve.base import gpu_memory
from pdserve.base.errors import SetupError
from pdserve.base.logs import get_logger
from pdserve.base.shared_memory import SharedMemory
from pdserve.base.tasks import run_to_completion
from pdserve.engine.gpu_identity import gpu_identity
from pdserve.engine.kv_cache import KvCache
from pdserve.worker.config import GPU_LAYER_GROUPS
from pdserve.worker.kv_bytes.device_launches import Launch
from pdserve.worker.kv_bytes.device_offers import DeviceOffers, Starts

log = get_logger(__name__)

#: Twice what a link of 50 GB/s moves in 2 ms, for several transfers.
STAGE_BYTES = 256 << 20


class Frames:
    """Frames of memory, by number, which are lent in the order in which they are asked for."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._free = [*range(count)]
        self._waiting = deque[tuple[int, asyncio.Future[list[int]]]]()

    @property
    def are_free(self) -> bool:
        """Whether none is lent."""
        return len(self._free) == self._count

    async def take(self, count: int) -> list[int]:
        """That many frames, at most all; waits for them."""
        assert count <= self._count
        if not self._waiting and count <= len(self._free):
            return self._pop(count)
        lent: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        self._waiting.append((count, lent))
        try:
            return await lent
        except asyncio.CancelledError:
            # Later callers may have waited only for this one.
            self.give_back(lent.result() if lent.done() and not lent.cancelled() else [])
            raise

    def give_back(self, frames: Sequence[int]) -> None:
        """Takes lent frames back."""
        self._free += frames
        while self._waiting and (self._waiting[0][1].done() or self._waiting[0][0] <= len(self._free)):
            count, lent = self._waiting.popleft()
            if not lent.done():
                lent.set_result(self._pop(count))

    def _pop(self, count: int) -> list[int]:
        taken = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        return taken


class _Prepared:
    """Implements `PreparedBlocks`."""

    def __init__(self, starts: Starts, launch: Launch, frames: Frames, taken: Sequence[int]) -> None:
        self.starts = starts
        self._launch = launch
        self._frames = frames
        self._taken = taken

    async def digests(self) -> Digests:
        return self._launch

    def release(self) -> None:
        self._frames.give_back(self._taken)


class StagedOffers:
    """Implements `OfferSource`."""

    #: Two offers of a transfer take a quarter of the memory at most.
    run_bytes = (8 << 20, STAGE_BYTES // 8)
    is_bounded = True

    def __init__(self, offers: DeviceOffers, shared: SharedMemory) -> None:
        """`shared`: memory for at least one bundle. Nothing is allocated before `open`."""
        self.shared = shared
        self._offers = offers
        self._frame_bytes = offers.layout.block_bytes
        self.frames = Frames(shared.num_bytes // self._frame_bytes)
        #: The memory as the GPU accesses it.
        self._memory: Buffer | None = None
        self._opening = asyncio.Lock()

    async def open(self) -> None:
        async with self._opening:
            if self._memory is None:
                self._memory = await run_to_completion(asyncio.to_thread(self._pinned))

    async def prepare(self, bundles: Sequence[Bundle], spec: MessageSpec) -> _Prepared:
        assert self._memory is not None, "it is open"
        await self._offers.computed(spec)
        block_bytes, num_blocks = self._offers.block_bytes(spec), sum(map(len, bundles))
        in_frame = self._frame_bytes // block_bytes
        taken = await self.frames.take(ceil(num_blocks / in_frame))
        try:
            offsets = np.array(taken, np.int64)[:, None] * self._frame_bytes + np.arange(in_frame) * block_bytes
            starts: Starts = offsets.reshape(-1)[:num_blocks]
            launch = await self._offers.scatter(self._memory, starts, bundles, spec)
            await run_to_completion(launch.found())
        except BaseException:
            self.frames.give_back(taken)
            raise
        return _Prepared(starts, launch, self.frames, taken)

    def _pinned(self) -> Buffer:
        """On a thread: it takes 0.2 s."""
        memory, device = self.shared.bytes, self._offers.device
        if device.type != "cuda":
            return memory
        try:
            return gpu_memory.pinned(device.index or 0, memory, is_read_only=False)
        except OSError as error:
            raise SetupError(f"{STAGE_BYTES >> 20} MiB of host memory cannot be pinned: {error}.") from error


def offers_on_gpu(cache: KvCache) -> DeviceOffers:
    """The blocks of a cache on a GPU for processes of this host, ready for use."""
    offers, layout = DeviceOffers(cache, gpu_identity(cache.tensor.device).uuid), cache.layout
    offers.compile(LayerGroups.of(layout, min(GPU_LAYER_GROUPS, layout.num_layers)).layers)
    try:
        offers.staged = StagedOffers(offers, SharedMemory(STAGE_BYTES, is_pinned=True))
    except (OSError, AttributeError) as error:
        log.warning("memory_not_shared", reason=error)
    return offers
