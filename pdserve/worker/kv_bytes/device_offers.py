"""KV blocks in GPU memory that are offered within the host: one launch of each worker for each offer.

The receiver's launch copies the blocks from the sender's cache and finds the sums of their digests; the sender's only
finds the sums. No launch waits for another process: the sender offers blocks whose event has occurred, and the
receiver's own event says when it has read them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from weakref import WeakKeyDictionary

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
from pdserve.base.ids import BlockId
from pdserve.base.shared_memory import ShareableMemory
from pdserve.base.tasks import run_to_completion
from pdserve.engine.gpu_identity import gpu_identity
from pdserve.engine.kv_cache import KvCache
from pdserve.worker.config import GPU_LAYER_GROUPS
from pdserve.worker.kv_bytes.device_launches import DeviceLaunches, EventWatch, Slot
from pdserve.worker.kv_bytes.digest_keys import DigestKeys, TransferKeys

Starts = npt.NDArray[np.int64]

#: Bytes of one offer. With fewer, more time goes to launches and messages; with more, other transfers wait longer.
_RUN_BYTES = 256 << 20
#: Recent transfers whose keys are kept. Those of one are as large as a block's layers in a message.
_KEPT_KEYS = 32
#: Bytes of other processes' memory by which torch is asked on which device it sees them.
_PROBED_BYTES = 512


class DeviceOffers:
    """Implements `OfferedMemory`."""

    run_bytes = (_RUN_BYTES, _RUN_BYTES)

    def __init__(self, cache: KvCache, gpu: str) -> None:
        """`gpu`: UUID of the cache's GPU."""
        self.gpu = gpu
        self._cache = cache
        self._device = cache.tensor.device
        self._keys = DigestKeys(self._device, _KEPT_KEYS)
        self._launches = DeviceLaunches(self._device, "kv-launches")
        self._steps = EventWatch("kv-steps")
        #: The devices on which torch sees other processes' memory.
        self._devices: WeakKeyDictionary[Buffer, torch.device] = WeakKeyDictionary()

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
        launching = self._launching(bundles, spec)
        return await self._launches.launch(launching.digest, partial(launching.digests_of, digest=spec.digest))

    async def pull(self, source: Buffer, starts: Starts, bundles: Sequence[Bundle], spec: MessageSpec) -> list[bytes]:
        ids, rest = np.divmod(starts - self._span(spec.layers).start, self._cache.layout.block_bytes)
        if rest.any():
            raise TransferError("What was offered does not lie where this layout has blocks.")
        launching = self._launching(bundles, spec)
        gather = partial(launching.gather, self._cache_in(source), ids)
        launch = await self._launches.launch(gather, partial(launching.digests_of, digest=spec.digest))
        return await run_to_completion(launch.found())

    def warm_up(self, messages: Sequence[slice]) -> None:
        """Copies blocks onto themselves, so that no request pays for compiling. `messages`: their layers."""
        cache, keys, slot = self._cache, TransferKeys(bytes(KEY_BYTES), self._device), Slot(self._device)
        for layers in messages:
            num_bytes = self._slice_bytes(layers)
            largest = min(MAX_BLOCKS, _RUN_BYTES // num_bytes, cache.num_blocks)
            counts = {1, min(2, cache.num_blocks), largest if largest * num_bytes >= kernels.LARGE_BYTES else 1}
            for count in counts:
                launching = _Launching(cache.tensor, [[BlockId(block) for block in range(count)]], layers, keys)
                for launch in (launching.digest, partial(launching.gather, cache.tensor, launching.ids)):
                    launch(slot)
                    if self._device.type == "cuda":
                        torch.cuda.synchronize(self._device)  # Before the slot is used again.

    def _launching(self, bundles: Sequence[Bundle], spec: MessageSpec) -> _Launching:
        return _Launching(self._cache.tensor, bundles, spec.layers, self._keys.of(spec.digest.device_key))

    def _slice_bytes(self, layers: slice) -> int:
        span = self._span(layers)
        return int(span.stop - span.start)

    def _span(self, layers: slice) -> slice:
        layout = self._cache.layout
        return span_of(layers, layout.only_group.num_layers, layout.block_bytes)

    def _cache_in(self, source: Buffer) -> Tensor:
        """Another process's cache, as a tensor of its blocks: [blocks, ...]."""
        memory, own = torch.as_tensor(source, device=self._device_of(source)), self._cache.tensor
        num_blocks = len(memory) // self._cache.layout.block_bytes
        blocks = memory[: num_blocks * self._cache.layout.block_bytes].view(own.dtype)
        return blocks.view(num_blocks, *own.shape[1:])

    def _device_of(self, source: Buffer) -> torch.device:
        """The device on which torch sees memory that the own one reads: the one that has it. It would copy others."""
        if self._device.type == "cpu":
            return self._device
        found = self._devices.get(source)
        if found is None:
            found = self._devices[source] = _seen_on(source[:_PROBED_BYTES], self._device)
        return found


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
        sums, (ids,) = self._prepared(slot, self.ids)
        keys = self.keys.on_device(self.packed_bytes)
        kernels.digest(kernels.Blocks(self.cache, ids), keys, sums, layers=self.layers)
        return len(sums)

    def gather(self, source: Tensor, source_ids: Starts, slot: Slot) -> int:
        """`source`: another cache, of which the blocks are copied."""
        sums, (ids, ids_there) = self._prepared(slot, self.ids, source_ids)
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
        together = np.concatenate(ids)
        slot.ids_here.numpy()[: len(together)] = together
        on_device = slot.ids[: len(together)]
        on_device.copy_(slot.ids_here[: len(together)], non_blocking=True)
        num_sums = kernels.num_sums(self.cache, len(self.ids), self.layers)
        slot.hold(num_sums)
        return slot.sums[:num_sums], list(on_device.view(len(ids), -1))


def _ids_of(bundles: Sequence[Bundle]) -> Starts:
    return np.fromiter((block_id for bundle in bundles for block_id in bundle), np.int64)


def _seen_on(memory: Buffer, own: torch.device) -> torch.device:
    address = memory.__cuda_array_interface__["data"][0]  # type: ignore[attr-defined]
    others = (torch.device("cuda", index) for index in range(torch.cuda.device_count()))
    for device in (own, *others):
        if torch.as_tensor(memory, device=device).data_ptr() == address:
            return device
    raise TransferError("torch does not find the GPU that has another process's memory.")


def offers_on_gpu(cache: KvCache) -> DeviceOffers | None:
    """The blocks of a cache on a GPU for processes of this host, ready for use; None: it is not shared."""
    if cache.shared is None:
        return None
    offers = DeviceOffers(cache, gpu_identity(cache.tensor.device).uuid)
    num_layers = cache.layout.num_layers
    offers.warm_up(LayerGroups.of(cache.layout, min(GPU_LAYER_GROUPS, num_layers)).layers)
    return offers
