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
    """Waits for events of one stream of a device, on a thread."""

    def __init__(self, device: torch.device, name: str) -> None:
        # A thread starts with the first GPU as its current one, on which CUDA would then have a context, too.
        on_start = (torch.cuda.set_device, (device,)) if device.type == "cuda" else (None, ())
        self._thread = ThreadPoolExecutor(1, name, *on_start)

    async def occurred(self, event: HostVisibleEvent) -> None:
        """Returns when the event, and those that others wait for already, have occurred."""
        if not event.query():
            await asyncio.get_running_loop().run_in_executor(self._thread, event.synchronize)


class Slot:
    """Buffers of one launch at a time. Those that are `here` are in host memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_gpu = device.type == "cuda"
        #: Ids of the own blocks, and of another process's: int64 [2, MAX_BLOCKS].
        self.ids_here = torch.empty(2, MAX_BLOCKS, dtype=torch.int64, pin_memory=self._on_gpu)
        self.ids = torch.empty(2, MAX_BLOCKS, dtype=torch.int64, device=device)
        self.event = sleeping_event() if self._on_gpu else None
        self._allocate(_SLOT_SUMS)

    def hold(self, num_sums: int) -> None:
        """Has memory for that many sums from now on."""
        if num_sums > len(self.sums):
            self._allocate(num_sums)

    def _allocate(self, num_sums: int) -> None:
        self.sums = torch.empty(num_sums, dtype=torch.int64, device=self._device)
        self.sums_here = torch.empty(num_sums, dtype=torch.int64, pin_memory=self._on_gpu)


class Launch:
    """Implements `Digests`."""

    def __init__(self, launches: DeviceLaunches, slot: Slot, read: Callable[[Tensor], list[bytes]]) -> None:
        """`read`: the digests of the sums in a slot's host memory."""
        self.slot = slot
        #: Done when the launch has ended and was read.
        self.digests: asyncio.Future[list[bytes]] = asyncio.get_running_loop().create_future()
        self._launches = launches
        self._read = read

    @property
    def has_ended(self) -> bool:
        """Whether the GPU is done with it."""
        return self.slot.event is None or bool(self.slot.event.query())  # type: ignore[no-untyped-call]

    def finish(self) -> None:
        """Reads the digests of a launch that has ended."""
        self.digests.set_result(self._read(self.slot.sums_here))

    async def found(self) -> list[bytes]:
        return await self._launches.wait_for(self)


class DeviceLaunches:
    """The launches of one worker, on a stream of their own: none waits for a running step.

    Belongs to the event loop.
    """

    def __init__(self, device: torch.device, name: str) -> None:
        on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._free = [Slot(device) for _ in range(_NUM_SLOTS)]
        #: Callers that wait for a slot, in their order.
        self._takers: deque[asyncio.Future[Slot]] = deque()
        #: Launches that have not been read, in their order.
        self._running: deque[Launch] = deque()
        #: Callers that wait for one of them, and the task that follows the first one while there are any.
        self._num_waiting = 0
        self._following: asyncio.Task[None] | None = None
        #: Why the GPU is lost; None: it is not.
        self._lost: RuntimeError | None = None
        self._watch = EventWatch(device, name)

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
            self._give_back(slot)
            if isinstance(error, torch.OutOfMemoryError):
                raise TransferError(f"The GPU has no memory left to digest blocks: {error}") from error
            raise
        launch = Launch(self, slot, lambda sums: read(sums[:num_sums]))
        self._running.append(launch)
        return launch

    async def wait_for(self, launch: Launch) -> list[bytes]:
        """The digests of a launch, when it has ended."""
        self._reap()
        self._num_waiting += 1
        try:
            self._follow()
            return await asyncio.shield(launch.digests)
        finally:
            self._num_waiting -= 1

    async def _take(self) -> Slot:
        if self._lost is not None:
            raise self._lost
        self._reap()
        if self._free:
            return self._free.pop()
        taker: asyncio.Future[Slot] = asyncio.get_running_loop().create_future()
        self._takers.append(taker)
        self._follow()
        try:
            return await taker
        except asyncio.CancelledError:
            if taker.done() and not taker.cancelled():
                self._give_back(taker.result())
            raise

    def _give_back(self, slot: Slot) -> None:
        while self._takers:
            taker = self._takers.popleft()
            if not taker.done():
                taker.set_result(slot)
                return
        self._free.append(slot)

    def _reap(self) -> None:
        while self._running and self._running[0].has_ended:
            launch = self._running.popleft()
            launch.finish()
            self._give_back(launch.slot)

    def _follow(self) -> None:
        if self._following is None and self._running:
            self._following = asyncio.create_task(self._follow_first(), name="launches")

    async def _follow_first(self) -> None:
        """Waits for the first launch, while somebody waits for any. Only then is its event recorded again."""
        try:
            while self._running and (self._num_waiting or self._takers):
                event = self._running[0].slot.event
                assert event is not None
                await self._watch.occurred(event)
                self._reap()
        except RuntimeError as error:  # As torch reports a lost GPU: for all of them, and for good.
            self._lost = error
            while self._running:
                self._running.popleft().digests.set_exception(error)
            while self._takers:
                if not (taker := self._takers.popleft()).done():
                    taker.set_exception(error)
        finally:
            self._following = None
