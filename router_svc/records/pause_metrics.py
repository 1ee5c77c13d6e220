"""The metrics of pauses in requests' outputs."""

from __future__ import annotations

from collections.abc import Iterable

from router_svc.records.families import Families
from router_svc.records.pauses import STALL_S, StallReason

# fmt: off
_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)
# fmt: on


class PauseMetrics:
    """Implements `PauseCounters`."""

    def __init__(self, families: Families, errors: Iterable[str]) -> None:
        """`errors`: all reasons of recoveries."""
        self._seconds = families.histogram(
            "stream_pause_seconds",
            "Time between two messages with tokens of one request between which it was retried",
            _BUCKETS,
        )
        self._recoveries = families.counter_by(
            "reason", "recoveries", "Outputs that went on after a failure, by its error", errors
        )
        self._stalls = families.counter_by(
            "reason", "stream_stalls", f"Pauses of at least {STALL_S:g} s in an output", StallReason
        )

    def recovered(self, error: str, seconds: float) -> None:
        """An output has gone on, so long after its last tokens."""
        self._recoveries.inc(error)
        self._seconds.observe(seconds)

    def stalled(self, reason: StallReason) -> None:
        """An output has stalled."""
        self._stalls.inc(reason)
