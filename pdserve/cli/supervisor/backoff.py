"""Decides how long to wait before a restart. Pure: the caller measures time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BackoffPolicy:
    """Exponential backoff: doubles from `first_s` to `max_s`, and resets after a run of `stable_s`."""

    first_s: float = 0.5
    max_s: float = 10.0
    stable_s: float = 30.0

    def delay_s(self, previous_delay_s: float | None, ran_s: float) -> float:
        """Delay before the next start, given the delay before the start that now failed (None: it was the first)."""
        if previous_delay_s is None or ran_s >= self.stable_s:
            return self.first_s
        return min(previous_delay_s * 2, self.max_s)
