"""Admission control: a bounded first-come-first-served queue in front of the cluster's capacity. Pure.

Capacity is counted in sequences. A full queue refuses at once, with a Retry-After computed from the rate at which
requests have left the cluster recently.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.base.errors import Overloaded

#: Number of departures over which the drain rate is measured, and how long they count.
_RATE_SAMPLES = 64
_RATE_WINDOW_S = 60.0
#: Fewer departures than this give no rate.
_RATE_MIN_SAMPLES = 4
RETRY_AFTER_MIN_S = 1.0
RETRY_AFTER_MAX_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrant:
    """One prompt that asks to be admitted."""

    sequences: int
    #: Prompt tokens that no worker has cached.
    uncached_tokens: int = 0


@dataclass(slots=True, eq=False, kw_only=True)
class QueueSlot:
    """The slot of one prompt, first in the queue and then among the admitted."""

    sequences: int
    uncached_tokens: int
    offered_at: float
    admitted_at: float | None = None


class DrainRate:
    """Recent departures per second while requests waited. Without a queue they only show how few requests came."""

    def __init__(self) -> None:
        self._departures: deque[float] = deque(maxlen=_RATE_SAMPLES)

    def note(self, now: float) -> None:
        """A request left the cluster."""
        self._departures.append(now)

    def forget(self) -> None:
        """The queue is empty."""
        self._departures.clear()

    def per_second(self, now: float) -> float | None:
        """The rate, or None while there are too few departures."""
        while self._departures and self._departures[0] < now - _RATE_WINDOW_S:
            self._departures.popleft()
        if len(self._departures) < _RATE_MIN_SAMPLES:
            return None
        # Measured until now instead of the last departure: a cluster that has stopped draining must not look fast.
        return len(self._departures) / max(now - self._departures[0], 1e-3)


class AdmissionQueue:
    """Slots in order of arrival. Every method that can free capacity returns the slots it admitted."""

    def __init__(self, *, max_waiting: int, max_wait_s: float) -> None:
        self._max_waiting = max_waiting
        self._max_wait_s = max_wait_s
        self._capacity = 0
        self._admitted: set[QueueSlot] = set()
        self._in_use = 0
        # A dict for its order and its constant-time removal.
        self._waiting: dict[QueueSlot, None] = {}
        self._rate = DrainRate()

    @property
    def num_waiting(self) -> int:
        """Slots in the queue."""
        return len(self._waiting)

    @property
    def num_admitted(self) -> int:
        """Slots that are admitted."""
        return len(self._admitted)

    @property
    def uncached_tokens(self) -> int:
        """Uncached prompt tokens in the queue."""
        return sum(slot.uncached_tokens for slot in self._waiting)

    def offer(self, entrants: Sequence[Entrant], now: float) -> list[QueueSlot]:
        """One slot for each entry, all or none. Those with `admitted_at` set may start.

        Raises `Overloaded` when the queue has no space for those that would have to wait, or when their wait would
        exceed the limit.
        """
        must_wait = len(entrants) - self._num_fitting([entrant.sequences for entrant in entrants])
        if must_wait:
            self._refuse_if_overloaded(must_wait, now)
        slots = [
            QueueSlot(sequences=entrant.sequences, uncached_tokens=entrant.uncached_tokens, offered_at=now)
            for entrant in entrants
        ]
        self._waiting.update(dict.fromkeys(slots))
        self._admit(now)
        return slots

    def leave(self, slot: QueueSlot, now: float) -> list[QueueSlot]:
        """A waiting client has left, or a request has ended."""
        if slot in self._admitted:
            self._admitted.remove(slot)
            self._in_use -= slot.sequences
            if self._waiting:
                self._rate.note(now)
            else:
                self._rate.forget()
        else:
            self._waiting.pop(slot, None)
        return self._admit(now)

    def set_capacity(self, sequences: int, now: float) -> list[QueueSlot]:
        """The cluster can now run this many sequences concurrently."""
        self._capacity = sequences
        return self._admit(now)

    def retry_after_s(self, now: float) -> float:
        """Time until the current queue has been admitted at the present rate: 1 to 60 s, in whole seconds."""
        rate = self._rate.per_second(now)
        if rate is None:
            return RETRY_AFTER_MIN_S
        return float(min(max(math.ceil((self.num_waiting + 1) / rate), RETRY_AFTER_MIN_S), RETRY_AFTER_MAX_S))

    def _refuse_if_overloaded(self, must_wait: int, now: float) -> None:
        retry_after_s = self.retry_after_s(now)
        if self.num_waiting + must_wait > self._max_waiting:
            raise Overloaded(
                f"The queue is full ({self.num_waiting} waiting, limit {self._max_waiting}). "
                f"Retry after {retry_after_s:.0f} s.",
                retry_after_s=retry_after_s,
            )
        rate = self._rate.per_second(now)
        if rate is not None and (self.num_waiting + must_wait) / rate > self._max_wait_s:
            raise Overloaded(
                f"The wait in the queue would be about {(self.num_waiting + must_wait) / rate:.0f} s "
                f"(limit {self._max_wait_s:.0f} s). Retry after {retry_after_s:.0f} s.",
                retry_after_s=retry_after_s,
            )

    def _num_fitting(self, sequences: Sequence[int]) -> int:
        """How many of the new entries could be admitted at once."""
        if self._waiting:
            return 0
        in_use, fitting = self._in_use, 0
        for count in sequences:
            if not self._fits(in_use, count):
                break
            in_use += count
            fitting += 1
        return fitting

    def _fits(self, in_use: int, count: int) -> bool:
        # A request with more sequences than the whole cluster can run is admitted alone, instead of never.
        return self._capacity > 0 and (in_use + count <= self._capacity or in_use == 0)

    def _admit(self, now: float) -> list[QueueSlot]:
        admitted = []
        while self._waiting:
            slot = next(iter(self._waiting))
            if not self._fits(self._in_use, slot.sequences):
                break
            del self._waiting[slot]
            self._admitted.add(slot)
            self._in_use += slot.sequences
            slot.admitted_at = now
            admitted.append(slot)
        return admitted
