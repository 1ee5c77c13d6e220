"""The KV cache as transports reach it: in place on a CPU, by way of pinned host memory on a GPU."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import torch
from torch import Tensor

from kvtransfer.memory import BlockMemory, InPlace
from kvtransfer.staging import Staged
from pdserve.base.errors import SetupError
from pdserve.base.ids import BlockId
from pdserve.base.layout import KvLayout
from pdserve.base.moment import Moment
from pdserve.base.tasks import to_its_end
from pdserve.engine.kv_cache import KvCache


class CacheCopies:
    """Implements `kvtransfer.staging.BlockCopies` for the blocks of a cache."""

    def __init__(self, cache: KvCache, slots: Tensor) -> None:
        """`slots`: as `slots_of`; of one of several ranks, its heads."""
        self._cache = cache
        self._slots = slots

    async def read(
        self, block_ids: Sequence[BlockId], slots: Sequence[int], layers: slice, after: Moment | None
    ) -> None:
        parts = [self._slots[slot, layers] for slot in slots]
        await to_its_end(asyncio.to_thread(self._cache.read_blocks, block_ids, parts, layers, after))

    async def write(self, block_ids: Sequence[BlockId], slots: Sequence[int], layers: slice) -> None:
        parts = [self._slots[slot, layers] for slot in slots]
        await to_its_end(asyncio.to_thread(self._cache.write_blocks, block_ids, parts, layers))


def block_memory(kv_cache: KvCache, staging_bytes: int) -> BlockMemory:
    """Raises `SetupError` when the stage cannot be had or is too small for a block."""
    if kv_cache.memory is not None:
        return InPlace(kv_cache)
    return staged(kv_cache, pinned_stage(kv_cache.layout, staging_bytes))


def staged(kv_cache: KvCache, stage: Tensor) -> Staged:
    """Blocks stop over in `stage`, uint8 in host memory."""
    layout = kv_cache.layout
    copies = CacheCopies(kv_cache, slots_of(stage, layout, kv_cache.tensor.dtype))
    return Staged(copies, stage.numpy(), layout.block_bytes)


def slots_of(stage: Tensor, layout: KvLayout, dtype: torch.dtype) -> Tensor:
    """The stage as blocks: [num_slots, num_layers, 2, num_kv_heads, block_size, head_dim]."""
    num_slots = stage.nbytes // layout.block_bytes
    shape = (num_slots, layout.num_layers, 2, layout.num_kv_heads, layout.block_size, layout.head_dim)
    return stage[: num_slots * layout.block_bytes].view(dtype).view(shape)


def pinned_stage(layout: KvLayout, staging_bytes: int) -> Tensor:
    """Whole slots, uint8. Raises `SetupError`."""
    size = stage_bytes(layout, staging_bytes)
    try:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        raise SetupError(
            f"{staging_bytes / 2**20:.0f} MiB of pinned host memory cannot be had: {error}. Lower --staging-memory."
        ) from error


def stage_bytes(layout: KvLayout, staging_bytes: int) -> int:
    """Bytes of whole slots. Raises `SetupError` when there is none."""
    if staging_bytes < layout.block_bytes:
        raise SetupError(f"--staging-memory {staging_bytes} is too small for a KV block of {layout.block_bytes} bytes.")
    return staging_bytes // layout.block_bytes * layout.block_bytes
