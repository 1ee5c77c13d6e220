"""KV blocks that stay in GPU memory on their way: packed, with digests, into a stage that transports can reach."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import cast

import torch
from torch import Tensor

from kernels.triton import blocks as kernels
from kvtransfer.handover.digest import DEVICE_DIGEST, MessageDigest
from kvtransfer.handover.layer_groups import LayerGroups
from kvtransfer.handover.memory import BlockMemory, Bundle, MessageSpec, OfferedMemory
from kvtransfer.handover.staging import StagedMemory, best_bundle_blocks
from kvtransfer.handover.ticket import KEY_BYTES
from kvtransfer.transport import Buffer
from pdserve.base.errors import SetupError, TransferError
from pdserve.base.gpu_memory import GpuBytes
from pdserve.base.ids import BlockId
from pdserve.base.tasks import run_to_completion
from pdserve.engine.kv_cache import KvCache, sleeping_event
from pdserve.worker.config import GPU_LAYER_GROUPS
from pdserve.worker.kv_bytes.digest_keys import LAUNCHING, DigestKeys
from pdserve.worker.kv_bytes.stage import Stage, stage_bytes

#: Recent transfers whose digest keys are kept.
_KEPT_KEYS = 8

Move = Callable[[Tensor, Tensor, Tensor, tuple[int, int]], Tensor]


class DeviceCopies:
    """Implements `kvtransfer.handover.staging.BlockCopies` between a cache and a stage in the same GPU's memory."""

    digest = DEVICE_DIGEST

    def __init__(self, cache: KvCache, stage: Tensor) -> None:
        """`stage`: uint8, on the same device as the cache."""
        self._cache = cache
        self._stage = Stage(stage, cache.layout, cache.tensor.dtype)
        self._device = cache.tensor.device
        on_gpu = self._device.type == "cuda"
        # A stream of its own: copies do not wait for running steps, and slow them down only by their memory traffic.
        self._stream = torch.cuda.Stream(self._device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._keys = DigestKeys(self._device, _KEPT_KEYS)

    async def read(self, bundles: Sequence[Bundle], slots: Sequence[int], spec: MessageSpec) -> list[bytes]:
        return await run_to_completion(asyncio.to_thread(self._move, self._pack, bundles, slots, spec))

    async def write(self, bundles: Sequence[Bundle], slots: Sequence[int], spec: MessageSpec) -> list[bytes]:
        return await run_to_completion(asyncio.to_thread(self._move, self._unpack, bundles, slots, spec))

    def _move(self, move: Move, bundles: Sequence[Bundle], slots: Sequence[int], spec: MessageSpec) -> list[bytes]:
        try:
            block_digests, done = self._launch(move, bundles, slots, spec)
        except torch.OutOfMemoryError as error:
            if self._stream is not None:
                self._stream.synchronize()  # Earlier launches still write to slots or blocks.
            # Other GPU errors concern more than this transfer, and are not caught.
            raise TransferError(f"The GPU has no memory left to pack blocks: {error}") from error
        if done is not None:
            done.synchronize()  # When the digests have arrived, so have the bytes.
        message_digests, first = [], 0
        for bundle in bundles:
            digests = block_digests[first : first + len(bundle)].numpy()
            message_digests.append(spec.digest.of_blocks(digests.tobytes()))
            first += len(bundle)
        return message_digests

    def _launch(
        self, move: Move, bundles: Sequence[Bundle], slots: Sequence[int], spec: MessageSpec
    ) -> tuple[Tensor, torch.cuda.Event | None]:
        """Digests of all blocks, uint8 [n, 16] in host memory, and on a GPU the event after which they are valid."""
        layers = (spec.layers.start, spec.layers.stop)
        if self._stream is not None:
            torch.cuda.set_device(self._device)  # A new thread starts with the first GPU.
        with LAUNCHING, nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            if spec.after is not None:
                spec.after.wait()
            keys = self._keys.of(spec.digest.device_key).on_device(self._cache.layout.block_bytes)
            digests = []
            for bundle, slot in zip(bundles, slots, strict=True):
                ids = torch.tensor(bundle).to(self._device, non_blocking=True)
                message = self._stage.message(slot, len(bundle), spec.layers).view(len(bundle), -1)
                digests.append(move(message, ids, keys, layers))
            together = torch.cat(digests)
            host = torch.empty(together.shape, dtype=together.dtype, pin_memory=self._stream is not None)
            host.copy_(together, non_blocking=True)
            return host, None if self._stream is None else self._stream.record_event(sleeping_event())

    def _pack(self, message: Tensor, ids: Tensor, keys: Tensor, layers: tuple[int, int]) -> Tensor:
        heads = (0, self._cache.layout.only_group.num_kv_heads)
        return kernels.pack(self._cache.tensor, ids, message, keys, layers=layers, heads=heads)

    def _unpack(self, message: Tensor, ids: Tensor, keys: Tensor, layers: tuple[int, int]) -> Tensor:
        heads = (0, self._cache.layout.only_group.num_kv_heads)
        return kernels.unpack(message, self._cache.tensor, ids, keys, layers=layers, heads=heads)

    def warm_up(self) -> None:
        """Packs blocks and unpacks them again unchanged, so that no request pays for compiling. Takes some seconds."""
        num_layers = self._cache.layout.num_layers
        groups = LayerGroups.of(self._cache.layout, min(GPU_LAYER_GROUPS, num_layers))
        for layers in (slice(0, num_layers), *groups.layers):
            for count in (1, 2, best_bundle_blocks(self._cache.layout.block_bytes)):
                bundle = [BlockId(block) for block in range(min(count, self._cache.num_blocks))]
                spec = MessageSpec(layers=layers, digest=MessageDigest(bytes(KEY_BYTES)))
                self._move(self._pack, [bundle], [0], spec)
                self._move(self._unpack, [bundle], [0], spec)


def device_block_memory(kv_cache: KvCache, staging_bytes: int, offers: OfferedMemory | None = None) -> BlockMemory:
    """Block memory whose stage is on the GPU that computes. Raises `SetupError` when that stage cannot be allocated."""
    stage = device_stage(kv_cache, stage_bytes(kv_cache.layout, staging_bytes))
    DeviceCopies(kv_cache, stage).warm_up()
    return staged_on_device(kv_cache, stage, offers=offers)


def staged_on_device(
    kv_cache: KvCache, stage: Tensor, bundle_blocks: int | None = None, offers: OfferedMemory | None = None
) -> StagedMemory:
    """Block memory whose stage is `stage`, uint8 on the cache's device."""
    on_gpu = GpuBytes(stage.device.index or 0, stage.data_ptr(), stage.nbytes, owner=stage)
    buffer: Buffer = stage.numpy() if stage.device.type == "cpu" else cast(Buffer, on_gpu)
    return StagedMemory(DeviceCopies(kv_cache, stage), buffer, kv_cache.layout.block_bytes, bundle_blocks, offers)


def device_stage(kv_cache: KvCache, size: int) -> Tensor:
    """Memory for a stage on the cache's device, uint8 [size]. Raises `SetupError`."""
    try:
        return torch.zeros(size, dtype=torch.uint8, device=kv_cache.tensor.device)
    except torch.OutOfMemoryError as error:
        raise SetupError(
            f"--staging-memory {size} does not fit into GPU memory in addition to weights and KV. Lower it, or use "
            "--handover-memory host."
        ) from error
