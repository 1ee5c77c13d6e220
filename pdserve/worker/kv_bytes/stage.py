"""The stage: memory whose slots hold blocks on their way between a KV cache and a transport."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvtransfer.handover.layer_groups import span_of
from kvtransfer.handover.memory import Bundle, MessageSpec
from kvtransfer.handover.staging import best_bundle_blocks
from pdserve.base.errors import SetupError
from pdserve.base.layout import KvLayout


class Stage:
    """The stage's memory, divided into slots of one block each."""

    def __init__(self, memory: Tensor, layout: KvLayout, dtype: torch.dtype, heads: slice = slice(None)) -> None:
        """`memory`: uint8. `layout`: layout of blocks with all heads. `heads`: the heads of this rank."""
        self._memory = memory
        self._dtype = dtype
        self._layout = layout
        self._group = layout.only_group
        self._heads = heads

    def message(self, slot: int, num_blocks: int, layers: slice) -> Tensor:
        """Layers of a bundle whose first block is in `slot`, with all heads: uint8, contiguous."""
        block_bytes = self._layout.block_bytes
        bundle = self._memory[slot * block_bytes : (slot + num_blocks) * block_bytes]
        return bundle[span_of(layers, self._group.num_layers, bundle.nbytes)]

    def tensor(self, slot: int, num_blocks: int, layers: slice) -> Tensor:
        """`message` as a tensor of the rank's heads: [num_blocks, layers, 2, heads, block_size, head_dim]."""
        group = self._group
        shape = (layers.stop - layers.start, 2, group.num_kv_heads, self._layout.block_size, group.head_dim)
        message = self.message(slot, num_blocks, layers)
        return message.view(self._dtype).view(num_blocks, *shape)[:, :, :, self._heads]

    def digests(self, bundles: Sequence[Bundle], slots: Sequence[int], spec: MessageSpec) -> list[bytes]:
        """Digests of the bundles' messages, in host memory. Too slow for an event loop."""
        located = zip(bundles, slots, strict=True)
        return [spec.digest(self.message(slot, len(bundle), spec.layers).numpy()) for bundle, slot in located]

    def blocks(self, bundles: Sequence[Bundle], slots: Sequence[int], layers: slice) -> list[Tensor]:
        """One tensor per block, as `tensor` without its first dimension."""
        located = zip(bundles, slots, strict=True)
        return [block for bundle, slot in located for block in self.tensor(slot, len(bundle), layers)]


def stage_bytes(layout: KvLayout, staging_bytes: int) -> int:
    """`staging_bytes` rounded down to whole slots. Raises `SetupError` when it is too small for one bundle."""
    num_blocks = best_bundle_blocks(layout.block_bytes)
    if staging_bytes < num_blocks * layout.block_bytes:
        raise SetupError(
            f"--staging-memory {staging_bytes} is too small: {num_blocks} KV blocks of {layout.block_bytes} bytes "
            f"travel together. Set it to at least {num_blocks * layout.block_bytes}."
        )
    return staging_bytes // layout.block_bytes * layout.block_bytes
