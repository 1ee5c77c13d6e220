"""Pauses in a request's output: those behind a lost worker, and any other that a reader notices. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from router_svc.records.event_log import EventLog
from router_svc.records.events import Retried, StallReason, WentOn
from router_svc.records.migration import is_moving

#: The output has stalled if two messages with tokens are at least this far apart.
STALL_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """Time without tokens, as the decision record has it."""

    #: Start, in seconds since the request was accepted.
    at: float
    seconds: float
    #: Tokens of all choices before it.
    completion_tokens: int
    #: The error behind which the output went on, else a `StallReason`.
    reason: str


class LastTokens(NamedTuple):
    """The latest tokens of an output. There is a new one in each step."""

    #: When they came, in seconds since the request was accepted.
    at: float
    #: Tokens of all choices until then, and events.
    completion_tokens: int
    num_events: int


def pause_behind(last: LastTokens, log: EventLog, now: float) -> WentOn | None:
    """The pause that ends with tokens at `now`. None: it was short, and not behind an error."""
    error = ""
    for logged in reversed(log):
        if logged.number < last.num_events:
            break
        if isinstance(logged.event, Retried):
            error = logged.event.reason
            break
    seconds = now - last.at
    has_stalled = seconds >= STALL_S
    if not error and not has_stalled:
        return None
    reason = StallReason.RECOVERY if error else StallReason.MOVE if is_moving(log) else StallReason.OTHER
    return WentOn(
        since=last.at,
        seconds=seconds,
        completion_tokens=last.completion_tokens,
        error=error,
        stall=reason if has_stalled else None,
    )


def pauses_of(log: EventLog) -> list[Pause]:
    """The pauses in order."""
    return [
        Pause(
            at=event.since,
            seconds=event.seconds,
            completion_tokens=event.completion_tokens,
            reason=event.error or event.stall or "",
        )
        for _, event in log.of(WentOn)
    ]
