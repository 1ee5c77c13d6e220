"""KV blocks in GPU memory that are offered within the host: one launch of each worker for each offer.

The receiver's launch copies the blocks from the sender's cache and finds the sums of their digests; the sender's only
finds the sums. No launch waits for another process: the sender offers blocks whose event has occurred, and the
receiver's own event says when it has read them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.reference.blocks import KEY_BYTES, WORD_BYTES
from kernels.triton import blocks as kernels
from kvtransfer.handover.digest import DIGEST_BYTES, MessageDigest
from kvtransfer.handover.layer_groups import span_of
from kvtransfer.handover.memory import Bundle, MessageSpec, OfferSource, UncopiedBlocks
from kvtransfer.transport import Buffer
from kvtransfer.transport.local.offer import MAX_BLOCKS
from kvtransfer.transport.path import DataEndpoint
from pdserve.base.device_event import HostVisibleEvent
from pdserve.base.errors import TransferError
from pdserve.base.gpu_memory import GpuBytes
from pdserve.base.ids import BlockId
from pdserve.base.shared_memory import ShareableMemory
from pdserve.base.tasks import run_to_completion
from pdserve.engine.kv_cache import KvCache
from pdserve.worker.config import GPU_LAYER_GROUPS
from pdserve.worker.kv_bytes.device_launches import DeviceLaunches, EventWatch, Launch, Slot
from pdserve.worker.kv_bytes.digest_keys import LAUNCHING, DigestKeys, TransferKeys

Starts = npt.NDArray[np.int64]

#: Bytes of one offer. With fewer, more time goes to launches and messages; with more, other transfers wait longer.
_RUN_BYTES = 256 << 20
#: Alignment of the layers of a block, in bytes.
_ALIGNMENT = 16
#: Maximum number of transfers whose keys are kept, and of the keys' bytes. A key is as large as a block's slice.
_KEPT_KEYS, _KEPT_KEY_BYTES = 256, 128 << 20


class _InCache:
    """Implements `OfferSource` with the cache itself."""

    run_bytes = (_RUN_BYTES, _RUN_BYTES)
    is_bounded = False

    def __init__(self, offers: DeviceOffers, shared: ShareableMemory) -> None:
        self.shared = shared
        self._offers = offers

    async def open(self) -> None:
        pass

    async def prepare(self, bundles: Sequence[Bundle], spec: MessageSpec) -> UncopiedBlocks:
        await self._offers.computed(spec)
        digest = partial(self._offers.digest, bundles, spec)
        return UncopiedBlocks(self._offers.starts(bundles, spec), digest)


class DeviceOffers:
    """Implements `OfferedMemory`, and makes the launches of its sources."""

    def __init__(self, cache: KvCache, gpu: str) -> None:
        """`gpu`: UUID of the cache's GPU."""
        self.device = cache.tensor.device
        self.layout = cache.layout
        self._gpu = gpu
        self._cache = cache
        key_bytes = cache.layout.block_bytes // min(GPU_LAYER_GROUPS, cache.layout.num_layers)
        self._keys = DigestKeys(self.device, min(_KEPT_KEYS, max(1, _KEPT_KEY_BYTES // key_bytes)))
        self._launches = DeviceLaunches(self.device, "kv-launches")
        self._steps = EventWatch(self.device, "kv-steps")
        self._in_cache = None if cache.shared is None else _InCache(self, cache.shared)
        #: For workers that cannot read this GPU.
        self.staged: OfferSource | None = None
        #: Layers of messages whose kernels are compiled.
        self._compiled: set[tuple[int, int]] = set()

    @property
    def memories(self) -> Sequence[ShareableMemory]:
        return [source.shared for source in (self._in_cache, self.staged) if source is not None]

    def sources_for(self, end: DataEndpoint) -> Sequence[OfferSource]:
        in_cache = self._in_cache if end.can_read(self._gpu) else None
        staged = self.staged if end.pins_host_memory else None
        return [source for source in (in_cache, staged) if source is not None]

    def block_bytes(self, spec: MessageSpec) -> int:
        return self._slice_bytes(spec.layers)

    def starts(self, bundles: Sequence[Bundle], spec: MessageSpec) -> Starts:
        """Where the blocks of messages begin in the cache: int64 [blocks]."""
        starts: Starts = _ids_of(bundles) * self.layout.block_bytes + self._span(spec.layers).start
        return starts

    async def computed(self, spec: MessageSpec) -> None:
        """Returns when the blocks hold the layers: after `spec.after`."""
        if spec.after is not None:
            assert isinstance(spec.after, HostVisibleEvent)
            await self._steps.occurred(spec.after)

    async def digest(self, bundles: Sequence[Bundle], spec: MessageSpec) -> Launch:
        """Launches what finds the digests of messages."""
        launching = await self._launching(bundles, spec)
        return await self._launches.launch(launching.digest, partial(launching.digests_of, digest=spec.digest))

    async def scatter(self, target: Buffer, starts: Starts, bundles: Sequence[Bundle], spec: MessageSpec) -> Launch:
        """Launches a copy of messages to memory that the GPU writes to, which finds their digests, too."""
        launching = await self._launching(bundles, spec)
        scatter = partial(launching.scatter, _as_words(target, self.device), starts)
        return await self._launches.launch(scatter, partial(launching.digests_of, digest=spec.digest))

    async def pull(self, source: Buffer, starts: Starts, bundles: Sequence[Bundle], spec: MessageSpec) -> list[bytes]:
        if (starts % _ALIGNMENT).any():
            raise TransferError("What was offered does not lie where this layout has layers.")
        launching = await self._launching(bundles, spec)
        gather = partial(launching.gather, _as_words(source, self.device), starts)
        launch = await self._launches.launch(gather, partial(launching.digests_of, digest=spec.digest))
        return await run_to_completion(launch.found())

    def compile(self, messages: Sequence[slice]) -> None:
        """Compiles the kernels for messages of these layers, with a block of its own. Takes seconds. On any thread."""
        on_gpu = self.device.type == "cuda"
        stream = torch.cuda.Stream(self.device) if on_gpu else None  # type: ignore[no-untyped-call]
        with LAUNCHING, nullcontext() if stream is None else torch.cuda.stream(stream):
            block, other = (torch.zeros_like(self._cache.tensor[:1]) for _ in range(2))
            words, keys = other.view(-1).view(torch.uint8), TransferKeys(bytes(KEY_BYTES), self.device)
            slot = Slot(self.device)
            for layers in messages:
                largest = min(MAX_BLOCKS, _RUN_BYTES // self._slice_bytes(layers))
                is_other = largest * self._slice_bytes(layers) >= kernels.LARGE_BYTES
                for count in (1, 2, *([largest] if is_other else [])):
                    launching = _Launching(block, [[BlockId(0)] * count], layers, keys)
                    copies: list[Callable[[Slot], int]] = [
                        partial(each, words, launching.ids) for each in (launching.gather, launching.scatter)
                    ]
                    for launch in (launching.digest, *copies):
                        launch(slot)
                        if stream is not None:
                            stream.synchronize()  # Before the slot is used again.
                self._compiled.add((layers.start, layers.stop))

    async def _launching(self, bundles: Sequence[Bundle], spec: MessageSpec) -> _Launching:
        if (spec.layers.start, spec.layers.stop) not in self._compiled:
            await asyncio.to_thread(self.compile, [spec.layers])
        return _Launching(self._cache.tensor, bundles, spec.layers, self._keys.of(spec.digest.device_key))

    def _slice_bytes(self, layers: slice) -> int:
        span = self._span(layers)
        return int(span.stop - span.start)

    def _span(self, layers: slice) -> slice:
        return span_of(layers, self.layout.only_group.num_layers, self.layout.block_bytes)


class _Launching:
    """What one launch is for. Its methods launch on the current stream, and return the number of sums in the slot."""

    def __init__(self, cache: Tensor, bundles: Sequence[Bundle], layers: slice, keys: TransferKeys) -> None:
        """`cache`: [num_blocks, num_layers, ...]."""
        self.cache = cache
        self.bundles = bundles
        self.ids = _ids_of(bundles)
        self.layers = (layers.start, layers.stop)
        self.packed_bytes = cache[0, layers].nbytes
        self.keys = keys

    def digest(self, slot: Slot) -> int:
        sums, [ids] = self._prepared(slot, self.ids)
        keys = self.keys.on_device(self.packed_bytes)
        kernels.digest(kernels.Blocks(self.cache, ids), keys, sums, layers=self.layers)
        return len(sums)

    def gather(self, source: Tensor, starts: Starts, slot: Slot) -> int:
        """Copies the blocks' bytes from `starts` in other memory, uint8."""
        sums, [ids, words] = self._prepared(slot, self.ids, starts // WORD_BYTES)
        blocks, keys = kernels.Blocks(self.cache, ids), self.keys.on_device(self.packed_bytes)
        kernels.gather(kernels.Slices(source, words), blocks, keys, sums, layers=self.layers)
        return len(sums)

    def scatter(self, target: Tensor, starts: Starts, slot: Slot) -> int:
        """Copies the blocks' bytes to `starts` in other memory, uint8."""
        sums, [ids, words] = self._prepared(slot, self.ids, starts // WORD_BYTES)
        blocks, keys = kernels.Blocks(self.cache, ids), self.keys.on_device(self.packed_bytes)
        kernels.scatter(blocks, kernels.Slices(target, words), keys, sums, layers=self.layers)
        return len(sums)

    def digests_of(self, sums: Tensor, digest: MessageDigest) -> list[bytes]:
        """The digests of the bundles' messages, from sums in host memory."""
        of_blocks = kernels.digests_of_sums(sums, len(self.ids), self.keys.first, self.packed_bytes)
        together, digests, first = of_blocks.numpy().tobytes(), list[bytes](), 0
        for bundle in self.bundles:
            end = first + len(bundle) * DIGEST_BYTES
            digests.append(digest.of_blocks(together[first:end]))
            first = end
        return digests

    def _prepared(self, slot: Slot, *ids: Starts) -> tuple[Tensor, list[Tensor]]:
        """Memory for sums, and the ids on the device."""
        count, on_device = len(self.ids), list[Tensor]()
        for each, here, there in zip(ids, slot.ids_here, slot.ids, strict=False):
            here[:count] = torch.from_numpy(each)
            on_device.append(there[:count].copy_(here[:count], non_blocking=True))
        num_sums = kernels.num_sums(self.cache, count, self.layers)
        slot.hold(num_sums)
        return slot.sums[:num_sums], on_device


def _ids_of(bundles: Sequence[Bundle]) -> Starts:
    return np.fromiter((block_id for bundle in bundles for block_id in bundle), np.int64)


def _as_words(memory: Buffer, own: torch.device) -> Tensor:
    """Whole words of memory that a device reads, uint8, on the device that has it: torch would copy it to another."""
    words: object = memory[: len(memory) // WORD_BYTES * WORD_BYTES]
    if own.type == "cpu":
        return torch.as_tensor(words)
    if not isinstance(words, GpuBytes):
        raise TransferError("Host memory was offered to a worker on a GPU.")
    tensor = torch.as_tensor(words, device=torch.device("cuda", words.device))
    assert tensor.data_ptr() == words.address
    return tensor
