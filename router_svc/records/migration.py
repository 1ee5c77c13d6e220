"""The moves of a request from one decode worker to another, as its decision record has them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from pdserve.base.ids import WorkerId


class MigrationOutcome(StrEnum):
    """How a move has ended. The values are labels of a metric."""

    #: The other worker has taken over.
    MOVED = "moved"
    #: The same, because the worker that the request was to leave was lost.
    SOURCE_LOST = "source_lost"
    #: The request has stayed.
    FAILED = "failed"
    #: The request has ended before.
    ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class Migration:
    """One move."""

    at: float
    #: Why the worker asked to be left: drain, full or rebalance.
    reason: str
    source: WorkerId
    target: WorkerId
    #: Whether full blocks were to be copied; else they were computed again.
    is_copied: bool
    ended_at: float | None = None
    outcome: MigrationOutcome | None = None
    sent_blocks: int = 0
    #: Time between the last tokens before the other worker took over and the next ones; None before these.
    pause_s: float | None = None
    error: str | None = None
