"""The bytes of all KV blocks of a worker: one tensor, block-major, so that a block is one range of memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext

import numpy as np
import numpy.typing as npt
import torch

from pdserve.base.device_event import DeviceEvent
from pdserve.base.errors import SetupError
from pdserve.base.ids import BlockId
from pdserve.base.layout import KvLayout

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8_e4m3": torch.float8_e4m3fn,
}


ALL_LAYERS = slice(None)


def sleeping_event() -> torch.cuda.Event:
    """Who waits for it sleeps instead of looking all the time."""
    event: torch.cuda.Event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    return event


class KvCache:
    """`tensor`: [num_blocks, num_layers, 2 (K, V), num_kv_heads, block_size, head_dim] of the layout's dtype."""

    def __init__(self, layout: KvLayout, num_blocks: int, device: torch.device) -> None:
        """Raises `SetupError` when the memory cannot be had."""
        self.layout = layout
        self.num_blocks = num_blocks
        shape = (num_blocks, layout.num_layers, 2, layout.num_kv_heads, layout.block_size, layout.head_dim)
        try:
            # Zeros: rows that attention masks out are still multiplied, and rubbish could be NaN.
            self.tensor = _zeros(shape, _DTYPES[layout.dtype], device)
        except (RuntimeError, MemoryError) as error:
            needed_mib = num_blocks * layout.block_bytes / 2**20
            raise SetupError(
                f"{num_blocks} KV blocks need {needed_mib:.0f} MiB on {device}, which cannot be allocated: {error}. "
                "Lower the size of the KV cache."
            ) from error
        flat = self.tensor.view(num_blocks, -1).view(torch.uint8)
        self._bytes: npt.NDArray[np.uint8] | None = flat.numpy() if device.type == "cpu" else None
        # Of their own: copies for transfers must not wait for the steps that are being computed.
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @property
    def memory(self) -> npt.NDArray[np.uint8] | None:
        """All of it: uint8 [num_blocks * layout.block_bytes]; None off the CPU."""
        return None if self._bytes is None else self._bytes.reshape(-1)

    def block_bytes_view(self, block_id: BlockId) -> npt.NDArray[np.uint8]:
        """The block's memory itself, writable: uint8 [layout.block_bytes]. Raises `SetupError` off the CPU."""
        if self._bytes is None:
            raise SetupError(f"KV blocks on {self.tensor.device} have no view in host memory.")
        view: npt.NDArray[np.uint8] = self._bytes[block_id]
        return view

    def record_event(self, num_layers: int) -> DeviceEvent | None:
        """When the device will have done what this thread has launched; None: it has. On the step thread."""
        if self._copies is None:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.tensor.device))
        return event

    def read_blocks(
        self,
        block_ids: Sequence[BlockId],
        into: Sequence[torch.Tensor],
        layers: slice = ALL_LAYERS,
        after: DeviceEvent | None = None,
    ) -> None:
        """Copies layers of blocks to host memory, each [layers, 2, num_kv_heads, block_size, head_dim].

        Contiguous, or at least K, and V, of each layer. What writes the blocks must have ended, or end before the
        moment `after`. On any thread.
        """
        self._copy(into, [self.tensor[block_id, layers] for block_id in block_ids], after)

    def write_blocks(
        self, block_ids: Sequence[BlockId], data: Sequence[torch.Tensor], layers: slice = ALL_LAYERS
    ) -> None:
        """Copies from host memory, as `read_blocks`, to blocks; steps that begin afterwards find it. On any thread."""
        self._copy([self.tensor[block_id, layers] for block_id in block_ids], data)

    def copy_blocks(self, pairs: Sequence[tuple[BlockId, BlockId]]) -> None:
        """Copy each source block onto its destination, one after the other: a later pair may depend on an earlier."""
        for source, destination in pairs:
            self.tensor[destination].copy_(self.tensor[source])

    def _copy(
        self, to: Sequence[torch.Tensor], source: Sequence[torch.Tensor], after: DeviceEvent | None = None
    ) -> None:
        if self._copies is not None:
            # Threads begin with the first GPU, of which torch would else take memory, too.
            torch.cuda.set_device(self.tensor.device)
        with nullcontext() if self._copies is None else torch.cuda.stream(self._copies):
            if after is not None:
                after.wait()
            for each_to, each_source in zip(to, source, strict=True):
                for to_piece, source_piece in _pieces(each_to, each_source):
                    to_piece.copy_(source_piece, non_blocking=True)
        if self._copies is not None:
            # Not the stream: behind these there may be copies of others, who wait for a step.
            # By sleeping: several threads may wait, and none of them is in a hurry of microseconds.
            self._copies.record_event(sleeping_event()).synchronize()


def _pieces(to: torch.Tensor, source: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What a GPU copies by itself: for what is not contiguous torch makes a copy first, in memory that is not pinned.

    `to` and `source`: [layers, 2, num_kv_heads, block_size, head_dim].
    """
    if to.is_contiguous() and source.is_contiguous():
        return [(to, source)]
    pieces = [
        piece
        for layer in zip(to.unbind(), source.unbind(), strict=True)
        for piece in zip(layer[0].unbind(), layer[1].unbind(), strict=True)
    ]
    assert all(each.is_contiguous() for piece in pieces for each in piece)
    return pieces


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Like `torch.zeros`, but on the CPU the system hands out zeroed pages when they are first written.

    `torch.zeros` writes them all at once, which for 2 GiB took up to 10 s of a worker's start on a virtual machine.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    flat = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(flat).view(dtype).view(shape)
