"""The lists of a decision record: the workers that were chosen, retries, fallbacks and chunks. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.base.ids import Epoch, WorkerId
from router_svc.records.event_log import EventLog
from router_svc.records.events import FellBack, PrefillProgressed, Retried, WorkerChosen


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The choice of a worker."""

    at: float
    attempt: int
    tier: str
    worker: WorkerId
    epoch: Epoch
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """A retry, or a fallback to something that was not planned."""

    at: float
    attempt: int
    reason: str
    worker: WorkerId | None
    error: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputedChunk:
    """Progress of a prefill worker."""

    at: float
    computed_tokens: int


def decisions_of(log: EventLog) -> list[Decision]:
    """The workers that were chosen, in order."""
    return [
        Decision(
            at=logged.at, attempt=logged.attempt, tier=event.tier, worker=event.worker, epoch=event.epoch, why=event.why
        )
        for logged, event in log.of(WorkerChosen)
    ]


def retries_of(log: EventLog) -> list[Incident]:
    """The failures behind which another attempt was made, in order."""
    return [
        Incident(at=logged.at, attempt=logged.attempt, reason=event.reason, worker=event.worker, error=event.error)
        for logged, event in log.of(Retried)
    ]


def fallbacks_of(log: EventLog) -> list[Incident]:
    """The prefills by a decode worker that were not planned, in order."""
    return [
        Incident(at=logged.at, attempt=logged.attempt, reason=event.reason, worker=event.worker, error=None)
        for logged, event in log.of(FellBack)
    ]


def chunks_of(log: EventLog) -> list[ComputedChunk]:
    """The chunks that prefill workers have computed."""
    return [
        ComputedChunk(at=logged.at, computed_tokens=event.computed_tokens)
        for logged, event in log.of(PrefillProgressed)
        if event.computed_tokens
    ]
