"""When to start a process that died again: pure, the caller measures time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BackoffPolicy:
    """Doubles from `first_s` to `longest_s` over rapid deaths; a run of `settled_s` starts over."""

    first_s: float = 0.5
    longest_s: float = 10.0
    settled_s: float = 30.0

    def delay_s(self, previous_delay_s: float | None, ran_s: float) -> float:
        """The wait before the next start, from the wait before the one that now died (None: it was the first)."""
        if previous_delay_s is None or ran_s >= self.settled_s:
            return self.first_s
        return min(previous_delay_s * 2, self.longest_s)
