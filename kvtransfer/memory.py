"""Where blocks live, as far as moving them is concerned."""

from __future__ import annotations

from typing import Protocol

from kvtransfer.transport import Buffer
from pdserve.base.ids import BlockId


class BlockMemory(Protocol):
    """The engine's KV storage, seen as bytes."""

    def block_bytes_view(self, block_id: BlockId) -> Buffer:
        """The block's bytes, `[block_bytes]` uint8, writable, without a copy. The memory outlives every transfer."""
        ...
