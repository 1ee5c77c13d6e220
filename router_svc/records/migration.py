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
    #: Time between the last tokens before the other worker took over and its first ones; None until those come.
    pause_s: float | None = None
    error: str | None = None


def migrations_of(log: EventLog) -> list[Migration]:
    """The moves in order."""
    found: dict[int, Migration] = {}
    for logged in log if log.num(MoveStarted) else ():
        match logged.event:
            case MoveStarted() as move:
                found[move.number] = Migration(
                    at=logged.at,
                    reason=move.reason,
                    source=move.source,
                    target=move.target,
                    is_copied=move.is_copied,
                )
            case MoveEnded(number=number) as end if number in found:
                found[number] = replace(
                    found[number], ended_at=logged.at, outcome=end.outcome, sent_blocks=end.sent_blocks, error=end.error
                )
            case MovePaused(number=number, seconds=seconds) if number in found:
                found[number] = replace(found[number], pause_s=seconds)
    return [*found.values()]


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


def taken_over(log: EventLog) -> int | None:
    """The number of the latest move, if its target takes over and has not sent tokens yet; else None."""
    events = _since_move(log)
    starts = (event.number for event in events if isinstance(event, MoveStarted))
    return next(starts) if any(isinstance(event, TookOver) for event in events) else None


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
