"""The times at which a request has reached what its decision record calls phases. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum

from router_svc.records.event_log import EventLog
from router_svc.records.events import (
    Admitted,
    BlocksReserved,
    Committed,
    DecodeStarted,
    Ended,
    Event,
    FirstDecoded,
    FirstToken,
    FirstWrite,
    PrefillProgressed,
)


class TracePhase(StrEnum):
    """Events in a request's life whose time is recorded, in the order of a request without faults."""

    ADMITTED = "admitted"
    RESERVED = "reserved"
    PREFILL_START = "prefill_start"
    FIRST_TOKEN = "first_token"
    FIRST_WRITE = "first_write"
    COMMIT = "commit"
    FIRST_DECODE = "first_decode"
    FINISH = "finish"


def phases_of(log: EventLog) -> Mapping[TracePhase, float]:
    """When each phase was reached for the first time, in seconds since the request was accepted."""
    found: dict[TracePhase, float] = {}
    for logged in log:
        for phase, ago_s in _reached(logged.event):
            found.setdefault(phase, max(0.0, logged.at - ago_s))
    return found


def _reached(event: Event) -> Iterator[tuple[TracePhase, float]]:
    """What was reached with an event, and how many seconds before it."""
    match event:
        case Admitted():
            yield TracePhase.ADMITTED, 0.0
        case BlocksReserved():
            yield TracePhase.RESERVED, 0.0
        case DecodeStarted(is_prefilled_locally=is_local):
            yield TracePhase.RESERVED, 0.0
            if not is_local:
                yield TracePhase.COMMIT, 0.0
        case PrefillProgressed(computing_s=computing_s):
            yield TracePhase.PREFILL_START, computing_s
        case FirstToken():
            yield TracePhase.FIRST_TOKEN, 0.0
        case FirstWrite():
            yield TracePhase.FIRST_WRITE, 0.0
        case Committed():
            yield TracePhase.COMMIT, 0.0
        case FirstDecoded():
            yield TracePhase.FIRST_DECODE, 0.0
        case Ended():
            yield TracePhase.FINISH, 0.0
