"""The I/O layer around `AdmissionQueue`: requests wait here for their turn."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from pdserve.base.errors import Displaced, NoWorkers, Overloaded
from router_svc.request.admission import AdmissionQueue, Entrant
from router_svc.request.client import Client
from router_svc.request.fair_order import QueueSlot


class Gate:
    """Admits requests in a fair order, with at most as many concurrent sequences as the cluster can run."""

    def __init__(self, *, max_waiting: int, max_wait_s: float) -> None:
        self._queue = AdmissionQueue(max_waiting=max_waiting, max_wait_s=max_wait_s)
        self._max_wait_s = max_wait_s
        self._waiters: dict[QueueSlot, asyncio.Future[None]] = {}
        #: Slots that lost their place to other clients, until they are given back.
        self._displaced: set[QueueSlot] = set()

    @property
    def num_waiting(self) -> int:
        """Prompts in the queue."""
        return self._queue.num_waiting

    @property
    def num_admitted(self) -> int:
        """Prompts that were admitted and have not ended."""
        return self._queue.num_admitted

    @property
    def uncached_tokens(self) -> int:
        """Uncached prompt tokens in the queue."""
        return self._queue.uncached_tokens

    def set_capacity(self, sequences: int) -> None:
        """Sets how many sequences the cluster can run concurrently."""
        self._wake(self._queue.set_capacity(sequences, self._now()))

    def enter(self, entrants: Sequence[Entrant], client: Client) -> list[QueueSlot]:
        """A queue slot for each entry, all or none. Each slot must be given to `leave` in the end.

        Raises `Overloaded`.
        """
        offer = self._queue.offer(entrants, client, self._now())
        for slot in offer.displaced:
            self._displace(slot)
        return offer.slots

    async def wait_for_turn(self, slot: QueueSlot) -> None:
        """Returns when the slot is admitted. Raises when that takes too long, or others come first.

        Raises:
            Overloaded: the queue was too long.
            NoWorkers: no decode worker was ready to run it.
        """
        if slot.admitted_at is not None:
            return
        waiter = self._waiters[slot] = asyncio.get_running_loop().create_future()
        if slot in self._displaced:
            self._displace(slot)
        try:
            async with asyncio.timeout_at(slot.offered_at + self._max_wait_s):
                await waiter
        except TimeoutError:
            if not self._queue.has_capacity:
                raise NoWorkers(
                    f"No decode worker became ready within {self._max_wait_s:.0f} s. Retry in a few seconds."
                ) from None
            retry_after_s = self._queue.retry_after_s(self._now())
            raise Overloaded(
                f"The request waited in the queue for {self._max_wait_s:.0f} s, which is the limit. "
                f"Retry after {retry_after_s:.0f} s.",
                retry_after_s=retry_after_s,
            ) from None
        finally:
            del self._waiters[slot]

    def _displace(self, slot: QueueSlot) -> None:
        self._displaced.add(slot)
        waiter = self._waiters.get(slot)
        if waiter is not None and not waiter.done():
            retry_after_s = self._queue.retry_after_s(self._now())
            waiter.set_exception(
                Displaced(
                    "The queue is full, and other clients have fewer requests in it. "
                    f"Retry after {retry_after_s:.0f} s, or send fewer at a time.",
                    retry_after_s=retry_after_s,
                )
            )

    def leave(self, slot: QueueSlot) -> None:
        """Gives a slot back. Further calls are harmless."""
        self._displaced.discard(slot)
        self._wake(self._queue.leave(slot, self._now()))

    def _wake(self, admitted: list[QueueSlot]) -> None:
        for slot in admitted:
            waiter = self._waiters.get(slot)
            if waiter is not None and not waiter.done():
                waiter.set_result(None)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
