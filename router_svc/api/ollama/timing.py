"""What an answer says of time: when each of its lines was made, and how long the whole took."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime


def rfc3339(instant: datetime) -> str:
    """`2026-11-26T09:30:00.000000Z`."""
    return instant.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


class Timing:
    """The clock of one request, which starts when it arrives."""

    def __init__(
        self,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._monotonic_ns = monotonic_ns
        self._now = now
        self._started = monotonic_ns()
        self._first: int | None = None

    def created_at(self) -> str:
        """The present time."""
        return rfc3339(self._now())

    def note_output(self) -> None:
        """Output has come. The first time counts."""
        if self._first is None:
            self._first = self._monotonic_ns()

    def durations(self) -> tuple[int, int, int]:
        """Nanoseconds from the arrival until now, from the arrival to the first output, and from there until now."""
        end = self._monotonic_ns()
        first = end if self._first is None else self._first
        return end - self._started, first - self._started, end - first
