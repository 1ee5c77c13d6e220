"""Admission control: a bounded queue in front of the cluster's capacity, fair between clients. Pure.

Capacity is counted in sequences. Best-effort requests get only what other requests leave, and take nothing from them. A
full queue refuses at once, with a Retry-After computed from the rate at which requests have left the cluster recently.
A client that holds fewer slots than others for its weight takes one of theirs instead, so no client can fill the queue
against others.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.base.errors import Overloaded
from router_svc.generation import is_best_effort
from router_svc.request.client import Client
from router_svc.request.fair_order import FairOrder, QueueSlot

#: Number of departures over which the drain rate is measured, and how long they count.
_RATE_SAMPLES = 64
_RATE_WINDOW_S = 60.0
#: Fewer departures than this give no rate.
_RATE_MIN_SAMPLES = 4
RETRY_AFTER_MIN_S = 1.0
RETRY_AFTER_MAX_S = 60.0
#: How long narrow requests may pass a wide one that does not fit yet.
PASSING_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrant:
    """One prompt that asks to be admitted."""

    sequences: int
    #: Prompt tokens that no worker has cached.
    uncached_tokens: int = 0
    #: Lower values come first.
    priority: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What an offer led to."""

    slots: list[QueueSlot]
    #: Slots of other clients that made room.
    displaced: list[QueueSlot]


class DrainRate:
    """Recent departures per second while requests waited. Without a queue they only show how few requests came.

    Time without any worker does not count: it says nothing about how fast the cluster is when one is back.
    """

    def __init__(self) -> None:
        self._departures: deque[float] = deque(maxlen=_RATE_SAMPLES)
        self._paused_at: float | None = None

    def pause(self, now: float) -> None:
        """No worker is ready from now on."""
        if self._paused_at is None:
            self._paused_at = now

    def resume(self, now: float) -> None:
        """A worker is ready."""
        if self._paused_at is not None:
            paused_s, self._paused_at = now - self._paused_at, None
            self._departures = deque((at + paused_s for at in self._departures), maxlen=_RATE_SAMPLES)

    def note(self, now: float) -> None:
        """A request left the cluster."""
        self._departures.append(now if self._paused_at is None else self._paused_at)

    def forget(self) -> None:
        """The queue is empty."""
        self._departures.clear()

    def per_second(self, now: float) -> float | None:
        """The rate, or None while there are too few departures."""
        now = now if self._paused_at is None else self._paused_at
        while self._departures and self._departures[0] < now - _RATE_WINDOW_S:
            self._departures.popleft()
        if len(self._departures) < _RATE_MIN_SAMPLES:
            return None
        # Measured until now instead of the last departure: a cluster that has stopped draining must not look fast.
        return len(self._departures) / max(now - self._departures[0], 1e-3)


class AdmissionQueue:
    """Slots in a fair order. Every method that can free capacity returns the slots it admitted."""

    def __init__(self, *, max_waiting: int, max_wait_s: float) -> None:
        self._max_waiting = max_waiting
        self._max_wait_s = max_wait_s
        self._capacity = 0
        self._admitted: set[QueueSlot] = set()
        #: Sequences that are admitted: all, and those that are not best-effort.
        self._in_use = self._in_use_of_others = 0
        self._waiting = FairOrder()
        self._rate = DrainRate()

    @property
    def num_waiting(self) -> int:
        """Slots in the queue."""
        return len(self._waiting)

    @property
    def has_capacity(self) -> bool:
        """Whether the cluster can run anything at present."""
        return self._capacity > 0

    @property
    def num_admitted(self) -> int:
        """Slots that are admitted."""
        return len(self._admitted)

    @property
    def uncached_tokens(self) -> int:
        """Uncached prompt tokens in the queue."""
        return sum(slot.uncached_tokens for slot in self._waiting)

    def offer(self, entrants: Sequence[Entrant], client: Client, now: float) -> Offer:
        """One slot for each entry, all or none. Those with `admitted_at` set may start.

        Raises `Overloaded` when the queue has no space for those that would have to wait, or when their wait would
        exceed the limit.
        """
        displaced: list[QueueSlot] = []
        must_wait = len(entrants) - self._num_fitting(entrants, now)
        if must_wait:
            priority = max(entrant.priority for entrant in entrants)
            self._refuse_if_long(client, priority, must_wait, now)
            displaced = self._make_room(client, priority, must_wait, now)
        slots = [
            QueueSlot(
                sequences=entrant.sequences,
                uncached_tokens=entrant.uncached_tokens,
                client=client,
                priority=entrant.priority,
                offered_at=now,
            )
            for entrant in entrants
        ]
        for slot in slots:
            self._waiting.add(slot)
        self._admit(now)
        return Offer(slots=slots, displaced=displaced)

    def leave(self, slot: QueueSlot, now: float) -> list[QueueSlot]:
        """A waiting client has left, or a request has ended."""
        if slot in self._admitted:
            self._admitted.remove(slot)
            self._count(slot, -slot.sequences)
            if self._waiting:
                self._rate.note(now)
            else:
                self._rate.forget()
        elif slot in self._waiting:
            self._waiting.remove(slot)
        return self._admit(now)

    def set_capacity(self, sequences: int, now: float) -> list[QueueSlot]:
        """The cluster can now run this many sequences concurrently."""
        self._capacity = sequences
        if sequences:
            self._rate.resume(now)
        else:
            self._rate.pause(now)
        return self._admit(now)

    def retry_after_s(self, now: float) -> float:
        """Time until the current queue has been admitted at the present rate: 1 to 60 s, in whole seconds."""
        rate = self._rate.per_second(now)
        if rate is None:
            return RETRY_AFTER_MIN_S
        return float(min(max(math.ceil((self.num_waiting + 1) / rate), RETRY_AFTER_MIN_S), RETRY_AFTER_MAX_S))

    def _make_room(self, client: Client, priority: int, must_wait: int, now: float) -> list[QueueSlot]:
        """Removes slots of clients that hold more. Raises `Overloaded` when that is not enough."""
        needed = self.num_waiting + must_wait - self._max_waiting
        if needed <= 0:
            return []
        displaced = self._waiting.displaceable(client, priority, must_wait, needed)
        if len(displaced) < needed:
            retry_after_s = self.retry_after_s(now)
            raise Overloaded(
                f"The queue is full ({self.num_waiting} waiting, limit {self._max_waiting}). "
                f"Retry after {retry_after_s:.0f} s.",
                retry_after_s=retry_after_s,
            )
        for slot in displaced:
            self._waiting.remove(slot)
        return displaced

    def _refuse_if_long(self, client: Client, priority: int, must_wait: int, now: float) -> None:
        rate = self._rate.per_second(now)
        if rate is None:
            return
        wait_s = (self._waiting.num_ahead(client, priority, must_wait) + must_wait) / rate
        if wait_s > self._max_wait_s:
            retry_after_s = self.retry_after_s(now)
            raise Overloaded(
                f"The wait in the queue would be about {wait_s:.0f} s (limit {self._max_wait_s:.0f} s). "
                f"Retry after {retry_after_s:.0f} s.",
                retry_after_s=retry_after_s,
            )

    def _num_fitting(self, entrants: Sequence[Entrant], now: float) -> int:
        """How many of the new entries could be admitted at once, passing those that wait because they are wide."""
        priority = max(entrant.priority for entrant in entrants)
        if any(self._holds(slot, now) for slot in self._waiting if slot.priority <= priority):
            return 0
        taken, fitting = 0, 0
        for entrant in entrants:
            if not self._fits(entrant, taken):
                break
            taken += entrant.sequences
            fitting += 1
        return fitting

    def _fits(self, entrant: Entrant | QueueSlot, taken: int = 0) -> bool:
        """Whether there is capacity for a prompt besides what is admitted, and `taken`."""
        in_use = taken + self._in_use_before(entrant.priority)
        # A request with more sequences than the whole cluster can run is admitted alone, instead of never.
        return self._capacity > 0 and (in_use + entrant.sequences <= self._capacity or in_use == 0)

    def _in_use_before(self, priority: int) -> int:
        return self._in_use if is_best_effort(priority) else self._in_use_of_others

    def _count(self, slot: QueueSlot, sequences: int) -> None:
        self._in_use += sequences
        self._in_use_of_others += 0 if is_best_effort(slot.priority) else sequences

    @staticmethod
    def _holds(slot: QueueSlot, now: float) -> bool:
        """Whether no other request may pass this slot any more, although it does not fit yet."""
        return slot.blocked_at is not None and now - slot.blocked_at >= PASSING_S

    def _admit(self, now: float) -> list[QueueSlot]:
        admitted = []
        for slot in self._waiting:
            if self._fits(slot):
                self._waiting.admit(slot)
                self._admitted.add(slot)
                self._count(slot, slot.sequences)
                slot.admitted_at = now
                admitted.append(slot)
                continue
            if self._in_use_before(slot.priority) >= self._capacity:
                break
            if slot.blocked_at is None:
                slot.blocked_at = now
            if self._holds(slot, now):
                break
        return admitted
