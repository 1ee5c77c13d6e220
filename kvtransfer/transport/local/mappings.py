"""Memory of other processes of the host, mapped to be read by this process, or by its GPU."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from kvtransfer.transport.base import Buffer
from pdserve.base import gpu_memory, shared_memory
from pdserve.base.errors import SetupError


class Mappings:
    """Belongs to the event loop. What takes long is done by a thread, in order."""

    def __init__(self, gpu: int | None) -> None:
        """`gpu`: the device that reads others' memory; None: there is none."""
        self._gpu = gpu
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-mappings")
        self._loop = asyncio.get_running_loop()
        self._is_closed = False

    def start(self) -> None:
        """A process that cannot have the thread finds out now. Raises: SetupError."""
        try:
            self._thread.submit(int)
        except RuntimeError as error:
            raise SetupError(f"No thread can be started that lets memory go: {error}.") from error

    def map(self, file: int, num_bytes: int, *, is_on_gpu: bool) -> Buffer:
        """Maps the first bytes behind a descriptor. Raises: OSError, ValueError."""
        if not is_on_gpu:
            return shared_memory.map_to_read(file, num_bytes)
        return gpu_memory.map_to_read(self._require_gpu(), file, num_bytes)

    def pin(self, memory: Buffer) -> asyncio.Future[Buffer]:
        """Mapped host memory as the GPU reads it. Raises: OSError."""
        pin = partial(gpu_memory.pinned, self._require_gpu(), memory, is_read_only=True)
        return self._loop.run_in_executor(self._thread, pin)

    def let_go(self, memories: list[Buffer]) -> None:
        """Empties the list. Unmapping the last view of a dead process's cache takes 150 ms per GiB."""
        if not self._is_closed:
            self._thread.submit(memories.clear)

    async def close(self) -> None:
        """Waits for all that the thread has to do."""
        self._is_closed = True
        await self._loop.run_in_executor(self._thread, int)
        self._thread.shutdown()

    def _require_gpu(self) -> int:
        if self._gpu is None:
            raise ValueError("it shows memory of a GPU, or for one, and this worker has none")
        return self._gpu
