"""KV blocks as transports see them: in place on a CPU, through a stage in pinned host memory on a GPU."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import torch
from torch import Tensor

from kvtransfer.handover.digest import HOST_DIGEST
from kvtransfer.handover.host_offers import HostOffers
from kvtransfer.handover.memory import BlockMemory, Bundle, InPlaceMemory, MessageSpec, OfferedMemory
from kvtransfer.handover.staging import StagedMemory
from kvtransfer.transport import Buffer, LocalTransports, Transport
from pdserve.base.errors import SetupError
from pdserve.base.ids import BlockId
from pdserve.base.layout import KvLayout
from pdserve.base.shared_memory import ShareableMemory, SharedMemory
from pdserve.base.tasks import run_to_completion
from pdserve.engine.kv_cache import KvCache
from pdserve.worker.kv_bytes.stage import Stage, stage_bytes


class CacheCopies:
    """Implements `kvtransfer.handover.staging.BlockCopies` for the blocks of a cache."""

    digest = HOST_DIGEST

    def __init__(self, cache: KvCache, stage: Stage, *, is_whole: bool = True) -> None:
        """`is_whole`: False for one of several ranks, whose heads alone are not a message that could be digested."""
        self._cache = cache
        self._stage = stage
        self._is_whole = is_whole

    async def read(self, bundles: Sequence[Bundle], slots: Sequence[int], spec: MessageSpec) -> list[bytes]:
        return await run_to_completion(asyncio.to_thread(self._read, bundles, slots, spec))

    async def write(self, bundles: Sequence[Bundle], slots: Sequence[int], spec: MessageSpec) -> list[bytes]:
        return await run_to_completion(asyncio.to_thread(self._write, bundles, slots, spec))

    def _read(self, bundles: Sequence[Bundle], slots: Sequence[int], spec: MessageSpec) -> list[bytes]:
        into = self._stage.blocks(bundles, slots, spec.layers)
        self._cache.read_blocks(_all_blocks(bundles), into, spec.layers, spec.after)
        return self._stage.digests(bundles, slots, spec) if self._is_whole else []

    def _write(self, bundles: Sequence[Bundle], slots: Sequence[int], spec: MessageSpec) -> list[bytes]:
        data = self._stage.blocks(bundles, slots, spec.layers)
        self._cache.write_blocks(_all_blocks(bundles), data, spec.layers)
        return self._stage.digests(bundles, slots, spec) if self._is_whole else []


def _all_blocks(bundles: Sequence[Bundle]) -> list[BlockId]:
    return [block_id for bundle in bundles for block_id in bundle]


def block_memory(
    kv_cache: KvCache, staging_bytes: int, *, is_on_device: bool = False, is_shared: bool = False
) -> BlockMemory:
    """The cache as transports see it.

    `is_on_device`: its stage is in the memory of the GPU, too. `is_shared`: processes of the host copy blocks from each
    other, where they can.
    Raises `SetupError` when the stage is too small or cannot be allocated.
    """
    if kv_cache.memory is not None:
        assert kv_cache.shared is None or isinstance(kv_cache.shared, SharedMemory)
        return in_place(kv_cache.memory, kv_cache.layout, kv_cache.shared)
    # Imported on use: Triton takes a second.
    from pdserve.worker.kv_bytes.device_blocks import device_block_memory
    from pdserve.worker.kv_bytes.staged_offers import offers_on_gpu

    offers = offers_on_gpu(kv_cache) if is_shared else None
    if is_on_device:
        return device_block_memory(kv_cache, staging_bytes, offers)
    return staged(kv_cache, pinned_stage(kv_cache.layout, staging_bytes), offers=offers)


def in_place(memory: Buffer, layout: KvLayout, shared: SharedMemory | None) -> InPlaceMemory:
    """Blocks in host memory, uint8 [num_blocks * block_bytes], which processes of the host may also copy from."""
    return InPlaceMemory(memory, layout, HostOffers(memory, layout, shared))


def share_blocks(memory: BlockMemory, transport: Transport) -> Sequence[ShareableMemory]:
    """Lets processes of this host copy the blocks, where memory and transport can do that: from what is returned."""
    if not isinstance(transport, LocalTransports) or memory.offers is None:
        return ()
    for each in memory.offers.memories:
        transport.share(each)
    return memory.offers.memories


def staged(
    kv_cache: KvCache, memory: Tensor, bundle_blocks: int | None = None, offers: OfferedMemory | None = None
) -> StagedMemory:
    """Block memory whose stage is `memory`, uint8 in host memory."""
    layout = kv_cache.layout
    copies = CacheCopies(kv_cache, Stage(memory, layout, kv_cache.tensor.dtype))
    return StagedMemory(copies, memory.numpy(), layout.block_bytes, bundle_blocks, offers)


def pinned_stage(layout: KvLayout, staging_bytes: int) -> Tensor:
    """Pinned host memory for whole slots, uint8. Raises `SetupError`."""
    size = stage_bytes(layout, staging_bytes)
    try:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        raise SetupError(
            f"Cannot allocate {staging_bytes / 2**20:.0f} MiB of pinned host memory: {error}. Lower --staging-memory."
        ) from error
