"""The metrics of pauses in requests' outputs."""

from __future__ import annotations

from collections.abc import Iterable

from router_svc.records.events import StallReason, WentOn
from router_svc.records.families import Families
from router_svc.records.pauses import STALL_S


class PauseMetrics:
    """Counts pauses, by the error behind which the output went on, and by why it stalled."""

    def __init__(self, families: Families, errors: Iterable[str], buckets: tuple[float, ...]) -> None:
        """`errors`: all reasons of recoveries. `buckets`: upper bounds in seconds."""
        self._seconds = families.histogram(
            "stream_pause_seconds",
            "Time between two messages with tokens of one request between which it was retried",
            buckets,
        )
        self._recoveries = families.counter_by(
            "reason", "recoveries", "Outputs that went on after a failure, by its error", errors
        )
        self._stalls = families.counter_by(
            "reason", "stream_stalls", f"Pauses of at least {STALL_S:g} s in an output", StallReason
        )

    def went_on(self, pause: WentOn) -> None:
        """An output has gone on."""
        if pause.error:
            self._recoveries.inc(pause.error)
            self._seconds.observe(pause.seconds)
        if pause.stall is not None:
            self._stalls.inc(pause.stall)
