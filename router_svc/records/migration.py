"""The moves of a request from one decode worker to another, as its decision record has them. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pdserve.base.ids import WorkerId
from router_svc.records.event_log import EventLog
from router_svc.records.events import Event, MigrationOutcome, MoveEnded, MovePaused, MoveStarted, TookOver


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


def migrations_of(log: EventLog) -> list[Migration]:
    """The moves in order."""
    found: list[Migration] = []
    for logged in log if log.num(MoveStarted) else ():
        match logged.event:
            case MoveStarted() as move:
                found.append(
                    Migration(
                        at=logged.at,
                        reason=move.reason,
                        source=move.source,
                        target=move.target,
                        is_copied=move.is_copied,
                    )
                )
            case MoveEnded() as end if found:
                found[-1] = replace(
                    found[-1], ended_at=logged.at, outcome=end.outcome, sent_blocks=end.sent_blocks, error=end.error
                )
            case MovePaused(seconds=seconds) if found:
                found[-1] = replace(found[-1], pause_s=seconds)
    return found


def open_move(log: EventLog) -> MoveStarted | None:
    """The move that has not ended, if there is one."""
    for logged in reversed(log) if log.num(MoveStarted) else ():
        match logged.event:
            case MoveEnded():
                return None
            case MoveStarted() as move:
                return move
    return None


def is_moving(log: EventLog) -> bool:
    """Whether a move has started, and has neither failed nor brought tokens."""
    return bool(_since_move(log))


def awaits_first_tokens(log: EventLog) -> bool:
    """Whether the target of a move has taken over, or is about to, and has not sent tokens yet."""
    return any(isinstance(event, TookOver) for event in _since_move(log))


def _since_move(log: EventLog) -> list[Event]:
    """The events from the latest move's start on, the latest first. Empty when it has failed or brought tokens."""
    found: list[Event] = []
    for logged in reversed(log) if log.num(MoveStarted) else ():
        found.append(logged.event)
        match logged.event:
            case MoveStarted():
                return found
            case MovePaused():
                return []
            case MoveEnded(outcome=outcome) if not outcome.has_moved:
                return []
    return []
