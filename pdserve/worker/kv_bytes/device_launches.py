"""Launches that find digests of KV blocks, and the buffers that they share: nothing is allocated for one of them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import torch
from torch import Tensor

from kvtransfer.transport.local.offer import MAX_BLOCKS
from pdserve.base.device_event import HostVisibleEvent
from pdserve.base.errors import TransferError
from pdserve.engine.kv_cache import sleeping_event
from pdserve.worker.kv_bytes.digest_keys import LAUNCHING

#: Launches at a time. A GPU runs them one after the other; more of them would only hold buffers.
_NUM_SLOTS = 8
#: Sums for which a slot has memory from the start: those of some hundred MiB of blocks.
_SLOT_SUMS = 1 << 16


class EventWatch:
    """Waits for the events of one stream, which occur in the order in which they are waited for."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)

    async def occurred(self, event: HostVisibleEvent) -> None:
        """Returns when the event has occurred. The event loop goes on meanwhile."""
        if not event.query():
            await asyncio.get_running_loop().run_in_executor(self._thread, event.synchronize)


class Slot:
    """Buffers of one launch at a time. All but the first are for what is launched."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        #: Ids of the own blocks, and behind them of another process's.
        self.ids_here = torch.empty(2 * MAX_BLOCKS, dtype=torch.int64, pin_memory=self.on_gpu)
        self.ids = torch.empty(2 * MAX_BLOCKS, dtype=torch.int64, device=device)
        self.event = sleeping_event() if self.on_gpu else None
        self._allocate(device, _SLOT_SUMS)

    def hold(self, num_sums: int) -> None:
        """Has memory for that many sums from now on."""
        if num_sums > len(self.sums):
            self._allocate(self.sums.device, num_sums)

    def _allocate(self, device: torch.device, num_sums: int) -> None:
        self.sums = torch.empty(num_sums, dtype=torch.int64, device=device)
        self.sums_here = torch.empty(num_sums, dtype=torch.int64, pin_memory=self.on_gpu)


class Launch:
    """Implements `Digests`."""

    def __init__(self, launches: DeviceLaunches, slot: Slot, read: Callable[[Tensor], list[bytes]]) -> None:
        """`read`: the digests of the sums in a slot's host memory."""
        self._launches = launches
        self._slot = slot
        self._read = read
        self._digests: list[bytes] | None = None

    @property
    def has_ended(self) -> bool:
        """Whether the GPU is done with it."""
        return self._slot.event is None or bool(self._slot.event.query())  # type: ignore[no-untyped-call]

    def finish(self) -> Slot:
        """Reads the digests of a launch that has ended, and returns its buffers."""
        self._digests = self._read(self._slot.sums_here)
        return self._slot

    async def ended(self, watch: EventWatch) -> None:
        """Returns when the GPU is done with it."""
        if self._digests is None and self._slot.event is not None:
            await watch.occurred(self._slot.event)

    async def found(self) -> list[bytes]:
        if self._digests is None:
            await self._launches.wait_for(self)
        assert self._digests is not None
        return self._digests


class DeviceLaunches:
    """The launches of one worker, on a stream of their own: none waits for a running step.

    Belongs to the event loop.
    """

    def __init__(self, device: torch.device, name: str) -> None:
        self._device = device
        on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._free = [Slot(device) for _ in range(_NUM_SLOTS)]
        #: Launches whose buffers are in use, in their order.
        self._running: deque[Launch] = deque()
        self._watch = EventWatch(name)

    async def launch(self, start: Callable[[Slot], int], read: Callable[[Tensor], list[bytes]]) -> Launch:
        """`start` launches on the current stream and returns the number of sums in its slot, which `read` gets later.

        Waits for a slot, if need be. Raises: TransferError when the GPU has no memory left.
        """
        slot = await self._take()
        try:
            with LAUNCHING, nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
                num_sums = start(slot)
                slot.sums_here[:num_sums].copy_(slot.sums[:num_sums], non_blocking=True)
                if slot.event is not None:
                    slot.event.record()
        except BaseException as error:
            if self._stream is not None:
                self._stream.synchronize()  # What was launched still uses the slot.
            self._free.append(slot)
            if isinstance(error, torch.OutOfMemoryError):
                raise TransferError(f"The GPU has no memory left to digest blocks: {error}") from error
            raise
        launch = Launch(self, slot, lambda sums: read(sums[:num_sums]))
        self._running.append(launch)
        return launch

    async def wait_for(self, launch: Launch) -> None:
        """Returns when the launch, and with it all before it, has ended and was read."""
        await launch.ended(self._watch)
        self._reap()

    async def _take(self) -> Slot:
        self._reap()
        while not self._free:
            await self.wait_for(self._running[0])
        return self._free.pop()

    def _reap(self) -> None:
        while self._running and self._running[0].has_ended:
            self._free.append(self._running.popleft().finish())
