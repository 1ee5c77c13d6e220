"""When a request has reached its milestones. The decision record has them under `phases`. Pure."""

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


class Milestone(StrEnum):
    """Points in a request's life whose time is recorded, in the order of a request without faults."""

    ADMITTED = "admitted"
    RESERVED = "reserved"
    PREFILL_START = "prefill_start"
    FIRST_TOKEN = "first_token"
    FIRST_WRITE = "first_write"
    COMMIT = "commit"
    FIRST_DECODE = "first_decode"
    FINISH = "finish"


def milestones_of(log: EventLog) -> Mapping[Milestone, float]:
    """When each milestone was reached for the first time, in seconds since the request was accepted."""
    found: dict[Milestone, float] = {}
    for logged in log:
        for milestone, ago_s in _reached(logged.event):
            found.setdefault(milestone, max(0.0, logged.at - ago_s))
    return found


def is_commit(event: Event) -> bool:
    """Whether the event shows that a prefill worker has handed over the prompt."""
    return any(milestone is Milestone.COMMIT for milestone, _ in _reached(event))


def _reached(event: Event) -> Iterator[tuple[Milestone, float]]:
    """What was reached with an event, and how many seconds before it."""
    match event:
        case Admitted():
            yield Milestone.ADMITTED, 0.0
        case BlocksReserved():
            yield Milestone.RESERVED, 0.0
        case DecodeStarted(is_prefilled_locally=is_local):
            yield Milestone.RESERVED, 0.0
            if not is_local:
                yield Milestone.COMMIT, 0.0
        case PrefillProgressed(computing_s=computing_s):
            yield Milestone.PREFILL_START, computing_s
        case FirstToken():
            yield Milestone.FIRST_TOKEN, 0.0
        case FirstWrite():
            yield Milestone.FIRST_WRITE, 0.0
        case Committed():
            yield Milestone.COMMIT, 0.0
        case FirstDecoded():
            yield Milestone.FIRST_DECODE, 0.0
        case Ended():
            yield Milestone.FINISH, 0.0
