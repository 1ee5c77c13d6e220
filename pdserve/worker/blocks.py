"""The KV cache as transports reach it: in place on a CPU, by way of pinned host memory on a GPU."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import torch
from torch import Tensor

from kvtransfer.handover.digest import HOST_DIGEST
from kvtransfer.handover.layer_groups import span_of
from kvtransfer.handover.memory import BlockMemory, Bundle, InPlace, Part
from kvtransfer.handover.staging import Staged, best_bundle
from pdserve.base.errors import SetupError
from pdserve.base.ids import BlockId
from pdserve.base.layout import KvLayout
from pdserve.base.tasks import to_its_end
from pdserve.engine.kv_cache import KvCache


class Stage:
    """Memory in whose slots blocks stop over, seen as numbers."""

    def __init__(self, memory: Tensor, layout: KvLayout, dtype: torch.dtype, heads: slice = slice(None)) -> None:
        """`memory`: uint8; `layout`: of blocks with all heads; `heads`: those of one of several ranks."""
        self._memory = memory
        self._dtype = dtype
        self._layout = layout
        self._heads = heads

    def message(self, slot: int, num_blocks: int, layers: slice) -> Tensor:
        """Layers of a bundle in slots from `slot` on, with all heads: uint8."""
        block_bytes = self._layout.block_bytes
        bundle = self._memory[slot * block_bytes : (slot + num_blocks) * block_bytes]
        return bundle[span_of(layers, self._layout.num_layers, bundle.nbytes)]

    def part(self, slot: int, num_blocks: int, layers: slice) -> Tensor:
        """The same, as numbers of the heads: [num_blocks, layers, 2, heads, block_size, head_dim]."""
        layout = self._layout
        shape = (layers.stop - layers.start, 2, layout.num_kv_heads, layout.block_size, layout.head_dim)
        message = self.message(slot, num_blocks, layers)
        return message.view(self._dtype).view(num_blocks, *shape)[:, :, :, self._heads]

    def digests(self, bundles: Sequence[Bundle], slots: Sequence[int], part: Part) -> list[bytes]:
        """Of the bundles' messages, in host memory. They may be large: not for an event loop."""
        places = zip(bundles, slots, strict=True)
        return [part.digest(self.message(slot, len(bundle), part.layers).numpy()) for bundle, slot in places]

    def parts(self, bundles: Sequence[Bundle], slots: Sequence[int], layers: slice) -> list[Tensor]:
        """Of all blocks, one by one."""
        places = zip(bundles, slots, strict=True)
        return [block for bundle, slot in places for block in self.part(slot, len(bundle), layers)]


class CacheCopies:
    """Implements `kvtransfer.handover.staging.BlockCopies` for the blocks of a cache."""

    digest = HOST_DIGEST

    def __init__(self, cache: KvCache, stage: Stage, *, is_whole: bool = True) -> None:
        """`is_whole`: False for one of several ranks, whose heads alone make no message that could be digested."""
        self._cache = cache
        self._stage = stage
        self._is_whole = is_whole

    async def read(self, bundles: Sequence[Bundle], slots: Sequence[int], part: Part) -> list[bytes]:
        return await to_its_end(asyncio.to_thread(self._read, bundles, slots, part))

    async def write(self, bundles: Sequence[Bundle], slots: Sequence[int], part: Part) -> list[bytes]:
        return await to_its_end(asyncio.to_thread(self._write, bundles, slots, part))

    def _read(self, bundles: Sequence[Bundle], slots: Sequence[int], part: Part) -> list[bytes]:
        into = self._stage.parts(bundles, slots, part.layers)
        self._cache.read_blocks(_all_blocks(bundles), into, part.layers, part.after)
        return self._stage.digests(bundles, slots, part) if self._is_whole else []

    def _write(self, bundles: Sequence[Bundle], slots: Sequence[int], part: Part) -> list[bytes]:
        data = self._stage.parts(bundles, slots, part.layers)
        self._cache.write_blocks(_all_blocks(bundles), data, part.layers)
        return self._stage.digests(bundles, slots, part) if self._is_whole else []


def _all_blocks(bundles: Sequence[Bundle]) -> list[BlockId]:
    return [block_id for bundle in bundles for block_id in bundle]


def block_memory(kv_cache: KvCache, staging_bytes: int) -> BlockMemory:
    """Raises `SetupError` when the stage cannot be had or is too small for a block."""
    if kv_cache.memory is not None:
        return InPlace(kv_cache, kv_cache.layout.num_layers)
    return staged(kv_cache, pinned_stage(kv_cache.layout, staging_bytes))


def device_block_memory(kv_cache: KvCache, staging_bytes: int) -> BlockMemory:
    """The stage is in the memory of the GPU that computes. Raises `SetupError` as `block_memory`."""
    # Only where it is used: Triton takes a second to import.
    from pdserve.worker.device_stage import DeviceCopies, device_stage, staged_on_device

    stage = device_stage(kv_cache, stage_bytes(kv_cache.layout, staging_bytes))
    DeviceCopies(kv_cache, stage).warm_up()
    return staged_on_device(kv_cache, stage)


def staged(kv_cache: KvCache, memory: Tensor, bundle_blocks: int | None = None) -> Staged:
    """Blocks stop over in `memory`, uint8 of the host."""
    layout = kv_cache.layout
    copies = CacheCopies(kv_cache, Stage(memory, layout, kv_cache.tensor.dtype))
    return Staged(copies, memory.numpy(), layout.block_bytes, bundle_blocks)


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
    """Bytes of whole slots. Raises `SetupError` when they are too few."""
    together = best_bundle(layout.block_bytes)
    if staging_bytes < together * layout.block_bytes:
        raise SetupError(
            f"--staging-memory {staging_bytes} is too small for {together} KV blocks of {layout.block_bytes} bytes, "
            "which travel together."
        )
    return staging_bytes // layout.block_bytes * layout.block_bytes
