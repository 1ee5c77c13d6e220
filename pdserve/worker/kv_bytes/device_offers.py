"""KV blocks in GPU memory that are offered within the host: one launch of each worker for each offer.

The receiver's launch copies the blocks from the sender's cache and finds the sums of their digests; the sender's only
finds the sums. No launch waits for another process: the sender offers blocks whose event has occurred, and the
receiver's own event says when it has read them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.reference.blocks import KEY_BYTES
from kernels.triton import blocks as kernels
from kvtransfer.handover.digest import DIGEST_BYTES, MessageDigest
from kvtransfer.handover.layer_groups import LayerGroups, span_of
from kvtransfer.handover.memory import Bundle, Digests, MessageSpec
from kvtransfer.transport import Buffer
from kvtransfer.transport.local.offer import MAX_BLOCKS
from pdserve.base.device_event import HostVisibleEvent
from pdserve.base.errors import TransferError
from pdserve.base.gpu_memory import GpuBytes
from pdserve.base.ids import BlockId
from pdserve.base.shared_memory import ShareableMemory
from pdserve.base.tasks import run_to_completion
from pdserve.engine.gpu_identity import gpu_identity
from pdserve.engine.kv_cache import KvCache
from pdserve.worker.config import GPU_LAYER_GROUPS
from pdserve.worker.kv_bytes.device_launches import DeviceLaunches, EventWatch, Slot
from pdserve.worker.kv_bytes.digest_keys import LAUNCHING, DigestKeys, TransferKeys

Starts = npt.NDArray[np.int64]

#: Bytes of one offer. With fewer, more time goes to launches and messages; with more, other transfers wait longer.
_RUN_BYTES = 256 << 20
#: Maximum number of transfers whose keys are kept, and of the keys' bytes. A key is as large as a block's slice.
_KEPT_KEYS, _KEPT_KEY_BYTES = 256, 128 << 20


class DeviceOffers:
    """Implements `OfferedMemory`."""

    run_bytes = (_RUN_BYTES, _RUN_BYTES)

    def __init__(self, cache: KvCache, gpu: str) -> None:
        """`gpu`: UUID of the cache's GPU."""
        self.gpu = gpu
        self._cache = cache
        self._device = cache.tensor.device
        key_bytes = cache.layout.block_bytes // min(GPU_LAYER_GROUPS, cache.layout.num_layers)
        self._keys = DigestKeys(self._device, min(_KEPT_KEYS, max(1, _KEPT_KEY_BYTES // key_bytes)))
        self._launches = DeviceLaunches(self._device, "kv-launches")
        self._steps = EventWatch(self._device, "kv-steps")
        #: Layers of messages whose kernels are compiled.
        self._compiled: set[tuple[int, int]] = set()

    @property
    def shared(self) -> ShareableMemory | None:
        return self._cache.shared

    def block_bytes(self, spec: MessageSpec) -> int:
        return self._slice_bytes(spec.layers)

    def starts(self, bundles: Sequence[Bundle], spec: MessageSpec) -> Starts:
        starts: Starts = _ids_of(bundles) * self._cache.layout.block_bytes + self._span(spec.layers).start
        return starts

    async def computed(self, spec: MessageSpec) -> None:
        if spec.after is not None:
            assert isinstance(spec.after, HostVisibleEvent)
            await self._steps.occurred(spec.after)

    async def digests(self, bundles: Sequence[Bundle], spec: MessageSpec) -> Digests:
        launching = await self._launching(bundles, spec)
        return await self._launches.launch(launching.digest, partial(launching.digests_of, digest=spec.digest))

    async def pull(self, source: Buffer, starts: Starts, bundles: Sequence[Bundle], spec: MessageSpec) -> list[bytes]:
        ids, rest = np.divmod(starts - self._span(spec.layers).start, self._cache.layout.block_bytes)
        if rest.any():
            raise TransferError("What was offered does not lie where this layout has blocks.")
        launching = await self._launching(bundles, spec)
        gather = partial(launching.gather, self._cache_in(source), ids)
        launch = await self._launches.launch(gather, partial(launching.digests_of, digest=spec.digest))
        return await run_to_completion(launch.found())

    def compile(self, messages: Sequence[slice]) -> None:
        """Compiles the kernels for messages of these layers, with a block of its own. Takes seconds. On any thread."""
        on_gpu = self._device.type == "cuda"
        stream = torch.cuda.Stream(self._device) if on_gpu else None  # type: ignore[no-untyped-call]
        with LAUNCHING, nullcontext() if stream is None else torch.cuda.stream(stream):
            scratch = torch.zeros_like(self._cache.tensor[:1])
            keys, slot = TransferKeys(bytes(KEY_BYTES), self._device), Slot(self._device)
            for layers in messages:
                largest = min(MAX_BLOCKS, _RUN_BYTES // self._slice_bytes(layers))
                is_other = largest * self._slice_bytes(layers) >= kernels.LARGE_BYTES
                for count in (1, 2, *([largest] if is_other else [])):
                    launching = _Launching(scratch, [[BlockId(0)] * count], layers, keys)
                    for launch in (launching.digest, partial(launching.gather, scratch, launching.ids)):
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
        layout = self._cache.layout
        return span_of(layers, layout.only_group.num_layers, layout.block_bytes)

    def _cache_in(self, source: Buffer) -> Tensor:
        """Another process's cache, as a tensor of its blocks: [blocks, ...]."""
        own, memory = self._cache.tensor, _as_tensor(source, self._device)
        num_blocks = len(memory) // self._cache.layout.block_bytes
        blocks = memory[: num_blocks * self._cache.layout.block_bytes].view(own.dtype)
        return blocks.view(num_blocks, *own.shape[1:])


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

    def gather(self, source: Tensor, source_ids: Starts, slot: Slot) -> int:
        """`source`: another cache, of which the blocks are copied."""
        sums, [ids, ids_there] = self._prepared(slot, self.ids, source_ids)
        here, there = kernels.Blocks(self.cache, ids), kernels.Blocks(source, ids_there)
        kernels.gather(there, here, self.keys.on_device(self.packed_bytes), sums, layers=self.layers)
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


def _as_tensor(memory: object, own: torch.device) -> Tensor:
    """Memory that a device reads, as a tensor on the device that has it: on another one, torch would copy it."""
    if own.type == "cpu":
        return torch.as_tensor(memory)
    if not isinstance(memory, GpuBytes):
        raise TransferError("Host memory was offered to a worker on a GPU.")
    tensor = torch.as_tensor(memory, device=torch.device("cuda", memory.device))
    assert tensor.data_ptr() == memory.address
    return tensor


def offers_on_gpu(cache: KvCache) -> DeviceOffers | None:
    """The blocks of a cache on a GPU for processes of this host, ready for use; None: it is not shared."""
    if cache.shared is None:
        return None
    offers = DeviceOffers(cache, gpu_identity(cache.tensor.device).uuid)
    num_layers = cache.layout.num_layers
    offers.compile(LayerGroups.of(cache.layout, min(GPU_LAYER_GROUPS, num_layers)).layers)
    return offers
