"""Who may start and who waits: a bounded first-come-first-served queue in front of the cluster's capacity. Pure.

Capacity is counted in sequences. A full queue is said at once, with the time after which trying again makes sense,
computed from how fast requests have been leaving lately.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.base.errors import Overloaded

#: Departures the drain rate is measured over, and how long they count.
_RATE_SAMPLES = 64
_RATE_WINDOW_S = 60.0
#: Fewer departures than this say nothing yet.
_RATE_MIN_SAMPLES = 4
RETRY_AFTER_MIN_S = 1.0
RETRY_AFTER_MAX_S = 60.0


@dataclass(slots=True, eq=False, kw_only=True)
class Place:
    """One request's place: in the queue first, then among the admitted."""

    sequences: int
    offered_at: float
    admitted_at: float | None = None


class DrainRate:
    """Departures per second over the recent past, while somebody waited: otherwise they only tell how few came."""

    def __init__(self) -> None:
        self._departures: deque[float] = deque(maxlen=_RATE_SAMPLES)

    def note(self, now: float) -> None:
        """A request left the cluster."""
        self._departures.append(now)

    def forget(self) -> None:
        """Nobody waits any more."""
        self._departures.clear()

    def per_second(self, now: float) -> float | None:
        """None while too little has been seen to tell."""
        while self._departures and self._departures[0] < now - _RATE_WINDOW_S:
            self._departures.popleft()
        if len(self._departures) < _RATE_MIN_SAMPLES:
            return None
        # To now, not to the last departure: a cluster that stopped draining must not look fast.
        return len(self._departures) / max(now - self._departures[0], 1e-3)


class AdmissionQueue:
    """Places in order of arrival. Every method that can free capacity returns the places it admitted."""

    def __init__(self, *, max_waiting: int, max_wait_s: float) -> None:
        self._max_waiting = max_waiting
        self._max_wait_s = max_wait_s
        self._capacity = 0
        self._admitted: set[Place] = set()
        self._in_use = 0
        # A dict for its order and its constant-time removal.
        self._waiting: dict[Place, None] = {}
        self._rate = DrainRate()

    @property
    def num_waiting(self) -> int:
        """Places in the queue."""
        return len(self._waiting)

    @property
    def num_admitted(self) -> int:
        """Places that run."""
        return len(self._admitted)

    def offer(self, sequences: Sequence[int], now: float) -> list[Place]:
        """One place for each entry, all or none; those with `admitted_at` set may start.

        Raises `Overloaded` when the queue has no room for those that would have to wait, or when they would wait longer
        than they may.
        """
        must_wait = len(sequences) - self._num_fitting(sequences)
        if must_wait:
            self._refuse_if_overloaded(must_wait, now)
        places = [Place(sequences=count, offered_at=now) for count in sequences]
        self._waiting.update(dict.fromkeys(places))
        self._admit(now)
        return places

    def leave(self, place: Place, now: float) -> list[Place]:
        """The place is given up, by a waiting client or by a request that has ended."""
        if place in self._admitted:
            self._admitted.remove(place)
            self._in_use -= place.sequences
            if self._waiting:
                self._rate.note(now)
            else:
                self._rate.forget()
        else:
            self._waiting.pop(place, None)
        return self._admit(now)

    def set_capacity(self, sequences: int, now: float) -> list[Place]:
        """The cluster can now run this many sequences at a time."""
        self._capacity = sequences
        return self._admit(now)

    def retry_after_s(self, now: float) -> float:
        """When the requests waiting now will have started, at the present rate: 1 to 60 seconds, whole."""
        rate = self._rate.per_second(now)
        if rate is None:
            return RETRY_AFTER_MIN_S
        return float(min(max(math.ceil((self.num_waiting + 1) / rate), RETRY_AFTER_MIN_S), RETRY_AFTER_MAX_S))

    def _refuse_if_overloaded(self, must_wait: int, now: float) -> None:
        if self.num_waiting + must_wait > self._max_waiting:
            raise Overloaded(
                f"The queue is full: {self.num_waiting} requests wait, {self._max_waiting} may. Try again later.",
                retry_after_s=self.retry_after_s(now),
            )
        rate = self._rate.per_second(now)
        if rate is not None and (self.num_waiting + must_wait) / rate > self._max_wait_s:
            raise Overloaded(
                f"The wait would be about {(self.num_waiting + must_wait) / rate:.0f} s, "
                f"longer than the {self._max_wait_s:.0f} s a request may wait. Try again later.",
                retry_after_s=self.retry_after_s(now),
            )

    def _num_fitting(self, sequences: Sequence[int]) -> int:
        """How many of the new entries could start at once."""
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
        # A request wider than the whole cluster runs alone instead of never.
        return self._capacity > 0 and (in_use + count <= self._capacity or in_use == 0)

    def _admit(self, now: float) -> list[Place]:
        admitted = []
        while self._waiting:
            place = next(iter(self._waiting))
            if not self._fits(self._in_use, place.sequences):
                break
            del self._waiting[place]
            self._admitted.add(place)
            self._in_use += place.sequences
            place.admitted_at = now
            admitted.append(place)
        return admitted
