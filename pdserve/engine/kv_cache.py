"""Memory of all KV blocks of a worker: one block-major tensor, in which a block is one range of bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext

import numpy as np
import numpy.typing as npt
import torch

from pdserve.base.cuda_driver import CudaError
from pdserve.base.device_event import DeviceEvent
from pdserve.base.errors import SetupError
from pdserve.base.gpu_memory import GpuMemory
from pdserve.base.ids import BlockId
from pdserve.base.layout import KvLayout
from pdserve.base.logs import get_logger
from pdserve.base.shared_memory import ShareableMemory, zeros

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8_e4m3": torch.float8_e4m3fn,
}


log = get_logger(__name__)

ALL_LAYERS = slice(None)


def sleeping_event() -> torch.cuda.Event:
    """A CUDA event for which threads wait by sleeping instead of polling."""
    event: torch.cuda.Event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    return event


class KvCache:
    """`tensor`: [num_blocks, num_layers, 2 (K, V), num_kv_heads, block_size, head_dim] of the layout's dtype."""

    def __init__(self, layout: KvLayout, num_blocks: int, device: torch.device, *, is_shared: bool = False) -> None:
        """`is_shared`: other processes of the host can map the blocks, as `shared`, where the system lets them.

        Raises `SetupError` when the memory cannot be allocated, or the layout has several groups."""
        self.layout = layout
        self.num_blocks = num_blocks
        group = layout.only_group
        shape = (num_blocks, group.num_layers, 2, group.num_kv_heads, layout.block_size, group.head_dim)
        try:
            # Zeros, because attention multiplies masked rows too, and uninitialized memory could be NaN.
            self.tensor, self.shared = _zeros(shape, _DTYPES[layout.dtype], device, is_shared=is_shared)
        except (RuntimeError, MemoryError) as error:
            needed_mib = num_blocks * layout.block_bytes / 2**20
            raise SetupError(
                f"Cannot allocate {needed_mib:.0f} MiB on {device} for {num_blocks} KV blocks: {error}. "
                "Use a smaller KV cache."
            ) from error
        flat = self.tensor.view(num_blocks, -1).view(torch.uint8)
        self._bytes: npt.NDArray[np.uint8] | None = flat.numpy() if device.type == "cpu" else None
        # A separate stream, because copies for transfers must not wait for steps.
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @property
    def memory(self) -> npt.NDArray[np.uint8] | None:
        """All blocks as bytes: uint8 [num_blocks * layout.block_bytes]; None unless on the CPU."""
        return None if self._bytes is None else self._bytes.reshape(-1)

    def block_bytes_view(self, block_id: BlockId) -> npt.NDArray[np.uint8]:
        """A writable view of the block: uint8 [layout.block_bytes]. Raises `SetupError` unless on the CPU."""
        if self._bytes is None:
            raise SetupError(f"KV blocks on {self.tensor.device} have no view in host memory; copy them instead.")
        view: npt.NDArray[np.uint8] = self._bytes[block_id]
        return view

    def record_event(self, num_layers: int) -> DeviceEvent | None:
        """An event after all that this thread has launched on the device; None: it is done. On the step thread."""
        if self._copies is None:
            return None
        event = sleeping_event()
        event.record(torch.cuda.current_stream(self.tensor.device))
        return event

    def read_blocks(
        self,
        block_ids: Sequence[BlockId],
        into: Sequence[torch.Tensor],
        layers: slice = ALL_LAYERS,
        after: DeviceEvent | None = None,
    ) -> None:
        """Copy layers of blocks to host memory, each [layers, 2, num_kv_heads, block_size, head_dim]. On any thread.

        Each tensor of `into` is contiguous, or at least K and V of each layer are. Writes to the blocks must have
        ended, or end before the event `after`.
        """
        self._copy(into, [self.tensor[block_id, layers] for block_id in block_ids], after)

    def write_blocks(
        self, block_ids: Sequence[BlockId], data: Sequence[torch.Tensor], layers: slice = ALL_LAYERS
    ) -> None:
        """Copy from host memory, laid out as in `read_blocks`, to blocks. Later steps see it. On any thread."""
        self._copy([self.tensor[block_id, layers] for block_id in block_ids], data)

    def copy_blocks(self, pairs: Sequence[tuple[BlockId, BlockId]]) -> None:
        """Copy each source block to its destination, in order: a later pair may depend on an earlier one."""
        for source, destination in pairs:
            self.tensor[destination].copy_(self.tensor[source])

    def _copy(
        self, to: Sequence[torch.Tensor], source: Sequence[torch.Tensor], after: DeviceEvent | None = None
    ) -> None:
        if self._copies is not None:
            # A thread starts with the first GPU as its current one, on which torch would then allocate memory, too.
            torch.cuda.set_device(self.tensor.device)
        with nullcontext() if self._copies is None else torch.cuda.stream(self._copies):
            if after is not None:
                after.wait()
            for each_to, each_source in zip(to, source, strict=True):
                for to_range, source_range in _contiguous_pairs(each_to, each_source):
                    to_range.copy_(source_range, non_blocking=True)
        if self._copies is not None:
            # An event instead of the stream: other threads may have queued copies behind these, which wait for a step.
            # Sleeping, because several threads may wait here, and microseconds do not matter to any of them.
            self._copies.record_event(sleeping_event()).synchronize()


def _contiguous_pairs(to: torch.Tensor, source: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Splits a copy into contiguous ones, which a GPU does by itself. For others torch copies via unpinned memory.

    `to` and `source`: [layers, 2, num_kv_heads, block_size, head_dim].
    """
    if to.is_contiguous() and source.is_contiguous():
        return [(to, source)]
    pairs = [
        pair
        for to_layer, source_layer in zip(to.unbind(), source.unbind(), strict=True)
        for pair in zip(to_layer.unbind(), source_layer.unbind(), strict=True)
    ]
    assert all(each.is_contiguous() for pair in pairs for each in pair)
    return pairs


def _zeros(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, is_shared: bool
) -> tuple[torch.Tensor, ShareableMemory | None]:
    """Like `torch.zeros`, but on the CPU the operating system provides zeroed pages at the first write.

    `torch.zeros` writes all pages at once. For 2 GiB that took up to 10 s at a worker's start on a virtual machine.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type == "cpu":
        flat, shared = zeros(num_bytes, is_shared=is_shared)
        return torch.from_numpy(flat).view(dtype).view(shape), shared
    on_gpu = _shared_on_gpu(num_bytes, device) if is_shared else None
    if on_gpu is None:
        return torch.zeros(shape, dtype=dtype, device=device), None
    memory = torch.as_tensor(on_gpu.bytes, device=device)[:num_bytes].zero_()
    torch.cuda.synchronize(device)  # Other streams use it, too.
    return memory.view(dtype).view(shape), on_gpu


def _shared_on_gpu(num_bytes: int, device: torch.device) -> GpuMemory | None:
    torch.cuda.empty_cache()  # CUDA does not know what torch has in reserve.
    try:
        return GpuMemory(torch.cuda.current_device() if device.index is None else device.index, num_bytes)
    except CudaError as error:
        log.warning("gpu_memory_not_shared", device=str(device), reason=error)
        return None
