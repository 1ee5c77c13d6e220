"""Metrics of the moves of requests between decode workers."""

from __future__ import annotations

from prometheus_client import Counter

from router_svc.records.events import MigrationOutcome
from router_svc.records.families import Families

#: Why workers ask to be left.
REASONS = ("drain", "full", "rebalance")
# fmt: off
_PAUSE_BUCKETS = (
    0.001, 0.002, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5,
)
# fmt: on


class MigrationMetrics:
    """Counts moves by reason and outcome. Every combination exists from the start."""

    def __init__(self, families: Families) -> None:
        common = families.common
        labels = [*common, "reason", "outcome"]
        self._ended = families.family(Counter, "migrations", "Moves of requests between decode workers", labels)
        self._common = tuple(common.values())
        for reason in REASONS:
            for outcome in MigrationOutcome:
                self._ended.labels(*self._common, reason, outcome)
        self.pause = families.histogram(
            "migration_pause_seconds",
            "Time between tokens of a request around the switch when it moved to another decode worker",
            _PAUSE_BUCKETS,
        )

    def ended(self, reason: str, outcome: MigrationOutcome) -> None:
        """A move has ended."""
        self._ended.labels(*self._common, reason, outcome).inc()
