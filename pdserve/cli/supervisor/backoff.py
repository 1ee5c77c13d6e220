"""Decides how long to wait before a restart. Pure: the caller measures time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BackoffPolicy:
    """A process that served is restarted at once; one that dies early again and again waits from `first_s` to `max_s`.

    Only the time from readiness on counts: a process that takes long to load and then dies is not a stable one.
    """

    first_s: float = 0.5
    max_s: float = 10.0
    stable_s: float = 5.0

    def delay_s(self, previous_delay_s: float | None, served_s: float | None) -> float:
        """Delay before the next start, given the delay before the start that now failed (None: it was the first).

        `served_s`: seconds from readiness to the end; None: it was never ready.
        """
        if served_s is not None and (previous_delay_s is None or served_s >= self.stable_s):
            return 0.0
        return min(max(2 * (previous_delay_s or 0.0), self.first_s), self.max_s)
