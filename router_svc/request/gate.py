"""The admission queue with waiting: the asyncio shell around `AdmissionQueue`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from pdserve.base.errors import Overloaded
from router_svc.request.admission import AdmissionQueue, Place


class Gate:
    """Lets requests through in order of arrival, as many sequences at a time as the cluster can run."""

    def __init__(self, *, max_waiting: int, max_wait_s: float) -> None:
        self._queue = AdmissionQueue(max_waiting=max_waiting, max_wait_s=max_wait_s)
        self._max_wait_s = max_wait_s
        self._waiters: dict[Place, asyncio.Future[None]] = {}

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return self._queue.num_waiting

    @property
    def num_running(self) -> int:
        """Requests that were let through and have not ended."""
        return self._queue.num_admitted

    def set_capacity(self, sequences: int) -> None:
        """How many sequences the cluster can run at a time."""
        self._wake(self._queue.set_capacity(sequences, self._now()))

    def enter(self, sequences: Sequence[int]) -> list[Place]:
        """A place for each entry, or `Overloaded` for all. Each must `leave` in the end."""
        return self._queue.offer(sequences, self._now())

    async def admitted(self, place: Place) -> None:
        """Returns when the place may start. Raises `Overloaded` when that takes longer than it may."""
        if place.admitted_at is not None:
            return
        waiter = self._waiters[place] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout_at(place.offered_at + self._max_wait_s):
                await waiter
        except TimeoutError:
            raise Overloaded(
                f"The request waited {self._max_wait_s:.0f} s without its turn coming. Try again later.",
                retry_after_s=self._queue.retry_after_s(self._now()),
            ) from None
        finally:
            del self._waiters[place]

    def leave(self, place: Place) -> None:
        """Gives a place up; doing so again is harmless."""
        self._wake(self._queue.leave(place, self._now()))

    def _wake(self, admitted: list[Place]) -> None:
        for place in admitted:
            waiter = self._waiters.get(place)
            if waiter is not None and not waiter.done():
                waiter.set_result(None)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
