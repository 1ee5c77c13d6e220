"""Memory of a test transfer, outside of the KV cache, and the speed of a plain copy to compare it with."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from kvtransfer.transport import LocalTransports, Transport
from pdserve.base.errors import NoFreeBlocks
from pdserve.base.ids import BlockId
from pdserve.base.layout import KvLayout
from pdserve.base.shared_memory import SharedMemory, zeros
from pdserve.observe.machine import available_memory_bytes

#: Largest test transfer, and the share of the free memory that it may take.
MAX_PROBE_BYTES = 64 << 20
_MEMORY_SHARE = 1 / 8
_COPY_ROUNDS = 3


class ProbeBlocks:
    """Blocks of test data in host memory."""

    def __init__(self, layout: KvLayout, num_blocks: int, *, is_shared: bool = False) -> None:
        """Touches all memory, so that page faults are not measured as transfer. Raises NoFreeBlocks."""
        needed = layout.block_bytes * num_blocks
        free = available_memory_bytes()
        if needed > free * _MEMORY_SHARE:
            raise NoFreeBlocks(
                f"A test transfer of {needed >> 20} MiB needs eight times as much free memory; {free >> 20} MiB are "
                "free here. Use a smaller one."
            )
        self.num_blocks = num_blocks
        #: As the blocks of a KV cache; None: they are not shared with processes of the host.
        self.memory, self.shared = zeros(needed, is_shared=is_shared)
        self.memory[:] = 1

    @property
    def block_ids(self) -> list[BlockId]:
        """All blocks."""
        return [BlockId(index) for index in range(self.num_blocks)]

    def copy_bytes_per_s(self) -> float:
        """Speed at which one thread copies this memory, the best of several rounds."""
        target = np.full_like(self.memory, 0)
        best_s = float("inf")
        for _ in range(_COPY_ROUNDS):
            started = time.perf_counter()
            np.copyto(target, self.memory)
            best_s = min(best_s, time.perf_counter() - started)
        return self.memory.nbytes / best_s


@contextmanager
def sharing(memory: SharedMemory | None, transport: Transport) -> Iterator[None]:
    """Within the block, processes of this host can read the memory, where the transport lets them."""
    if memory is None or not isinstance(transport, LocalTransports):
        yield
        return
    transport.share(memory)
    try:
        yield
    finally:
        try:
            transport.unshare(memory)
        finally:
            memory.close()


def num_probe_blocks(layout: KvLayout, num_bytes: int) -> int:
    """Whole blocks in a test transfer of about that size, at least one."""
    return max(1, min(num_bytes, MAX_PROBE_BYTES) // layout.block_bytes)
