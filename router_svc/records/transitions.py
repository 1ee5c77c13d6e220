"""What an event does to the progress of a request. Pure."""

from __future__ import annotations

from dataclasses import replace

from router_svc.records.event_log import EventLog
from router_svc.records.events import (
    BlocksReserved,
    DecodeStarted,
    Ended,
    Event,
    LocalPrefillOrdered,
    MoveEnded,
    MoveStarted,
    Retried,
    WorkerChosen,
)
from router_svc.records.request_state import RequestProgress, RequestState

_S = RequestState


def progress_after(progress: RequestProgress, event: Event, log: EventLog, *, at: float) -> RequestProgress:
    """The progress behind an event at `at` (Unix time). `log`: what was before. The same value: nothing has changed.

    Raises:
        InvalidTransition: the event cannot happen in the present state.
    """
    match event:
        case WorkerChosen(tier="prefill", worker=worker):
            progress = replace(progress, prefill_worker=worker)
        case BlocksReserved(worker=worker) | DecodeStarted(worker=worker) if worker != progress.decode_worker:
            progress = replace(progress, decode_worker=worker)
        case MoveEnded(outcome=outcome) if outcome.has_moved and (move := log.last(MoveStarted)) is not None:
            progress = replace(progress, decode_worker=move.target)
        case Ended(outcome=outcome):
            progress = replace(progress, outcome=outcome)
    for state in _states_after(progress.state, event):
        progress = progress.advance(state, at=at)
    return progress


def _states_after(state: RequestState, event: Event) -> tuple[RequestState, ...]:
    """The states that a request in `state` enters, in order."""
    reserved = (_S.RESERVED,) if state in (_S.QUEUED, _S.SCORING, _S.RETRYING) else ()
    match event:
        case WorkerChosen(tier="prefill", scores=scores):
            return (_S.SCORING if scores else _S.PREFILLING,)
        case Retried():
            return (_S.RETRYING,)
        case LocalPrefillOrdered():
            # Behind a retry, the attempt is a new one already.
            return () if state is _S.RETRYING else (_S.RETRYING,)
        case BlocksReserved():
            return reserved
        case DecodeStarted():
            return (*reserved, _S.DECODING)
        case Ended():
            return (event.state,)
    return ()
