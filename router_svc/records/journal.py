"""Reports what happens to one request: to its decision record, to Redis, metrics, trace and log."""

from __future__ import annotations

from pydantic_core import to_json

from pdserve.base.logs import get_logger
from pdserve.base.trace_context import TraceContext
from router_svc.records.events import (
    Ended,
    Event,
    FellBack,
    FirstToken,
    MigrationOutcome,
    MoveEnded,
    MovePaused,
    MoveStarted,
    NumericsChanged,
    Retried,
    WentOn,
    WorkerChosen,
    WorkerLost,
)
from router_svc.records.metrics import RouterMetrics
from router_svc.records.migration import open_move, taken_over
from router_svc.records.pauses import STALL_S, LastTokens, pause_behind
from router_svc.records.prefill import implied_fallback
from router_svc.records.record import Record
from router_svc.records.record_json import as_json, log_fields_of
from router_svc.records.request_store import RequestStore
from router_svc.records.spans import RequestTrace

log = get_logger(__name__)


class Journal:
    """The only writer of a request's record: of events (`append`), and of the numbers of tokens."""

    def __init__(
        self, record: Record, metrics: RouterMetrics, store: RequestStore, trace: RequestTrace | None = None
    ) -> None:
        self.record = record
        self._trace = trace or RequestTrace()
        record.trace = self._trace.context
        self._metrics = metrics
        self._store = store

    def append(self, event: Event) -> TraceContext | None:
        """Takes note of an event that happens now. Returns the trace context for the call if a worker is chosen."""
        return self._append(event, self.record.elapsed_s())

    def produced(self, completion_tokens: int) -> None:
        """New tokens are about to be sent to the client, `completion_tokens` in total."""
        record = self.record
        now, last = record.elapsed_s(), record.last_tokens
        record.completion_tokens = completion_tokens
        if last is None:
            self._append(FirstToken(), now)
        else:
            self._metrics.inter_token_latency.observe(now - last.at)
            if last.num_events != record.log.total or now - last.at >= STALL_S:
                self._went_on(last, now)
        record.last_tokens = LastTokens(now, completion_tokens, record.log.total)

    def _went_on(self, last: LastTokens, now: float) -> None:
        """Tokens come after events, or after a long time."""
        if (pause := pause_behind(last, self.record.log, now)) is not None:
            self._append(pause, now)
        if (number := taken_over(self.record.log)) is not None:
            self._append(MovePaused(number=number, seconds=now - last.at), now)

    def resumed(self, completion_tokens: int, cached_tokens: int) -> None:
        """Another router had these tokens, and the request goes on behind them. Called for each step of that router."""
        self.record.resumed_tokens = self.record.completion_tokens = completion_tokens
        self.record.resumed_cached_tokens = cached_tokens

    def _append(self, event: Event, at: float) -> TraceContext | None:
        record = self.record
        if (implied := self._implied(event)) is not None:
            self._append(implied, at)
        progress, move = record.progress, open_move(record.log)
        call = self._trace.start_call() if isinstance(event, WorkerChosen) else None
        record.append(event, at=at, call=call)
        self._report(event, move)
        if record.progress is not progress and not isinstance(event, Ended):
            self._store.put(record.progress)
        return call

    def _implied(self, event: Event) -> Event | None:
        """The event that an event implies, which is appended before it; None: there is none."""
        record = self.record
        if not isinstance(event, Ended):
            return implied_fallback(record.log, event, record.prompt_tokens)
        move = open_move(record.log)
        return None if move is None else MoveEnded(number=move.number, outcome=MigrationOutcome.ENDED)

    def _report(self, event: Event, move: MoveStarted | None) -> None:
        """Passes an event on to metrics and log. `move`: the one that was open before it."""
        metrics = self._metrics
        match event:
            case Retried(reason=reason):
                metrics.retried(reason)
            case FellBack(reason=reason):
                metrics.fell_back(reason)
            case NumericsChanged():
                metrics.numerics_changed()
                log.warning("numerics_changed", before=event.before, after=event.after, worker=event.worker)
            case WorkerLost():
                log.warning("request_lost_worker", worker=event.worker, remark=event.remark or None)
            case MoveEnded(outcome=outcome) if move is not None:
                metrics.migrations.ended(move.reason, outcome)
                log.info("request_moved", reason=move.reason, outcome=outcome, source=move.source, target=move.target)
            case MovePaused(seconds=seconds):
                metrics.migrations.pause.observe(seconds)
            case WentOn():
                metrics.pauses.went_on(event)
            case Ended():
                self._report_end(event)

    def _report_end(self, end: Ended) -> None:
        record, metrics = self.record, self._metrics
        if end.rejection is not None:
            metrics.rejected(end.rejection)
        if end.early is not None:
            metrics.ended_early(end.early)
        self._store.put(record.progress, to_json(as_json(record)).decode())
        metrics.ended(record)
        self._trace.end(record)
        log.info("request_ended", **log_fields_of(record))
