"""Reports what happens to one request: to its decision record, to Redis, metrics, trace and log."""

from __future__ import annotations

import json
from dataclasses import replace

from pdserve.base.errors import Cancelled, Displaced, EndedEarly, Overloaded, PdserveError, reason_of
from pdserve.base.logs import get_logger
from pdserve.base.trace_context import TraceContext
from pdserve.peers.workers import WorkerRecord
from pdserve.v1 import decode_pb2, prefill_pb2
from router_svc.records.metrics import RouterMetrics
from router_svc.records.migration import Migration, MigrationOutcome
from router_svc.records.pauses import Pauses
from router_svc.records.record import Record, TracePhase
from router_svc.records.request_state import RequestState
from router_svc.records.request_store import RequestStore
from router_svc.records.spans import RequestTrace
from router_svc.records.timeline import Phase
from router_svc.routing.local_prefill import LocalPrefillReason, PrefillPlan
from router_svc.routing.placement import Placement

log = get_logger(__name__)

_S = RequestState


class Journal:
    """The only writer of a request's record: each method reports one event, and moves the state if the event does."""

    def __init__(
        self, record: Record, metrics: RouterMetrics, store: RequestStore, trace: RequestTrace | None = None
    ) -> None:
        self.record = record
        self._trace = trace or RequestTrace()
        record.trace = self._trace.context
        self._metrics = metrics
        self._store = store
        self._last_tokens_s: float | None = None
        self._has_decoded = False
        self._pauses = Pauses(metrics.pauses, record.pauses)
        #: Whether a move has started, and has not failed or brought tokens yet.
        self._is_moving = False
        #: Whether another worker has taken over since the last tokens.
        self._has_switched = False
        #: What the loss of workers means for later decisions.
        self._remark = self._numerics_remark = ""
        #: Whether the prompt was computed for its log-probabilities, whatever is cached when it is computed again.
        self._is_scored = False
        #: Reason for a local prefill, should the decode worker do one.
        self._local_prefill_reason = LocalPrefillReason.SHORT
        #: Uncached tokens up to which the decode worker was to prefill.
        self._local_prefill_threshold = 0

    # -- admission and workers

    def admitted(self) -> None:
        """The request left the admission queue."""
        self.record.mark(TracePhase.ADMITTED)
        self.record.enter(Phase.RESERVE)

    def chose_decode(self, placement: Placement, plan: PrefillPlan) -> TraceContext | None:
        """A decode worker was chosen, with a plan where to prefill. Returns the trace context for the call to it."""
        remarks = (placement.why, plan.why, self._remark, self._numerics_remark)
        self._numerics_remark = ""
        self.record.add_decision(placement.worker, "; ".join(filter(None, remarks)))
        self._local_prefill_reason = plan.reason
        self._local_prefill_threshold = plan.threshold
        if plan.fallback:
            self._fall_back(plan.fallback, placement.worker)
        return self._trace.start_call()

    def chose_prefill(self, placement: Placement, *, scores: bool = False) -> TraceContext | None:
        """A prefill worker is about to receive the prompt. `scores`: it scores it. Returns the call's trace context."""
        self.record.add_decision(placement.worker, "; ".join(filter(None, (placement.why, self._remark))))
        self.record.enter(Phase.PREFILL)
        self._move(_S.SCORING if scores else _S.PREFILLING, placement.worker)
        return self._trace.start_call()

    def scored(self, *, has_output: bool) -> None:
        """The prompt has its log-probabilities or embedding. With `has_output`, workers get it again for that."""
        self._is_scored = True
        self.record.prefilled_by = "prefill"
        if has_output:
            self.record.timeline.restart(self.record.elapsed_s())

    def retry(self, error: PdserveError, worker: WorkerRecord) -> None:
        """The next attempt starts because the worker failed with `error`."""
        reason = reason_of(error)
        self.record.retries.append(self.record.incident(reason, worker.worker_id, error))
        self._metrics.retried(reason)
        self._pauses.error = reason if self.record.completion_tokens else ""
        self.record.timeline.restart(self.record.elapsed_s())
        if self.record.state is _S.RETRYING:
            # The previous attempt was refused before it reached a state of its own.
            self._move(_S.QUEUED)
        self._move(_S.RETRYING)

    def changed_numerics(self, before: str, worker: WorkerRecord) -> None:
        """The next attempt goes on with the tokens of another numerics class, for no worker of it is left."""
        self._numerics_remark = f"numerics change from {before} to {worker.numerics_class}"
        self._metrics.numerics_changed()
        log.warning("numerics_changed", before=before, after=worker.numerics_class, worker=worker.worker_id)

    def lost_worker(self, worker: WorkerRecord, remark: str) -> None:
        """A worker was lost under the request. `remark` goes to the reasons of later decisions."""
        log.warning("request_lost_worker", worker=worker.worker_id, remark=remark or None)
        self._remark = remark

    def prefill_on_decode(self, reason: str, worker: WorkerRecord) -> None:
        """The decode worker prefills although a prefill worker should have. It does so in an attempt of its own."""
        if self.record.state is not _S.RETRYING:
            self._move(_S.RETRYING)
        self._fall_back(reason, worker)

    # -- moves to another decode worker

    def moves(self, reason: str, source: WorkerRecord, target: Placement, *, is_copied: bool) -> TraceContext | None:
        """A move from one decode worker to another starts. Returns the trace context for the call."""
        record = self.record
        self._is_moving, self._has_switched = True, False
        how = "blocks are copied" if is_copied else "computed again"
        record.add_decision(target.worker, f"moves from {source.worker_id} ({reason}), {how}; {target.why}")
        record.migrations.append(
            Migration(
                at=record.elapsed_s(),
                reason=reason,
                source=source.worker_id,
                target=target.worker.worker_id,
                is_copied=is_copied,
            )
        )
        return self._trace.start_call()

    def takes_over(self) -> None:
        """The worker that a request moves to is about to go on alone."""
        self._has_switched = True

    def moved(self, outcome: MigrationOutcome, *, sent_blocks: int = 0, error: PdserveError | None = None) -> None:
        """The latest move has ended."""
        record = self.record
        move = record.migrations[-1] = replace(
            record.migrations[-1],
            ended_at=record.elapsed_s(),
            outcome=outcome,
            sent_blocks=sent_blocks,
            error=None if error is None else str(error),
        )
        self._metrics.migrations.ended(move.reason, outcome)
        if outcome in (MigrationOutcome.MOVED, MigrationOutcome.SOURCE_LOST):
            record.progress = replace(record.progress, decode_worker=move.target)
        else:
            self._is_moving = self._has_switched = False
        log.info("request_moved", reason=move.reason, outcome=outcome, source=move.source, target=move.target)

    # -- events of the decode worker

    def granted(self, granted: decode_pb2.TicketGranted, worker: WorkerRecord) -> None:
        """The decode worker has reserved blocks."""
        self._reserved(worker)
        self.record.reported["reserve_s"] = granted.reserve_s

    def started(self, started: decode_pb2.DecodeStarted, worker: WorkerRecord) -> None:
        """The sequences run on the decode worker."""
        self._reserved(worker)
        self._move(_S.DECODING)
        self.record.reported["decode_queue_s"] = started.queue_s
        if started.prefilled_locally:
            uncached = self.record.prompt_tokens - started.cached_tokens
            if self._local_prefill_reason is LocalPrefillReason.SHORT and uncached > self._local_prefill_threshold:
                self._fall_back("not_receivable", worker)
            self.record.prefilled_by = "decode"
            self.record.local_prefill_reason = self._local_prefill_reason
            self._set_cached(started.cached_tokens)
            self.record.enter(Phase.PREFILL, ago_s=started.computing_s)
        else:
            self.record.mark(TracePhase.COMMIT)
            self.record.enter(Phase.DECODE, ago_s=started.queue_s)

    def decoded(self) -> None:
        """The decode worker has sent tokens."""
        if not self._has_decoded:
            self._has_decoded = True
            self.record.mark(TracePhase.FIRST_DECODE)
            self.record.enter(Phase.DECODE)

    # -- events of the prefill worker

    def progressed(self, progress: prefill_pb2.PrefillProgress) -> None:
        """The prefill worker has reported its progress."""
        if progress.queued:
            return
        self.record.mark(TracePhase.PREFILL_START, ago_s=progress.computing_s)
        self._set_cached(progress.cached_tokens)
        if progress.computed_tokens:
            self.record.add_chunk(progress.computed_tokens)

    def prefilled(self, first: prefill_pb2.PrefillFirstToken) -> None:
        """The prefill worker has sampled the first tokens."""
        self.record.prefilled_by = "prefill"
        self.record.local_prefill_reason = None
        self._set_cached(first.cached_tokens)
        if not all(choice.finish_reason for choice in first.choices):
            self.record.enter(Phase.WIRE)

    def committed(self, done: prefill_pb2.PrefillDone) -> None:
        """The prefill worker has finished and reported its durations."""
        self.record.mark(TracePhase.COMMIT)
        times = {"prefill_queue_s": done.queue_s, "prefill_compute_s": done.compute_s, "transfer_s": done.transfer_s}
        self.record.reported.update(times, commit_s=done.commit_s, exposed_s=done.exposed_s)
        self.record.reported.update(sent_bytes=done.sent_bytes, sent_blocks=done.sent_blocks, chunks=done.chunks)

    # -- output

    def produced(self, completion_tokens: int) -> None:
        """New tokens are about to be sent to the client, `completion_tokens` in total."""
        before, self.record.completion_tokens = self.record.completion_tokens, completion_tokens
        now = self.record.elapsed_s()
        if self._last_tokens_s is None:
            self.record.mark(TracePhase.FIRST_TOKEN)
        else:
            gap_s = now - self._last_tokens_s
            self._metrics.inter_token_latency.observe(gap_s)
            self._pauses.went_on(self._last_tokens_s, gap_s, before, is_moving=self._is_moving)
            if self._has_switched:
                self._note_move(gap_s)
        self._last_tokens_s = now

    def resumed(self, completion_tokens: int, cached_tokens: int) -> None:
        """Another router had these tokens, and the request goes on behind them."""
        self.record.resumed_tokens = self.record.completion_tokens = completion_tokens
        self.record.cached_tokens = cached_tokens

    def _note_move(self, pause_s: float) -> None:
        """Notes the pause of a move: the worker that has taken over has sent tokens."""
        migrations = self.record.migrations
        migrations[-1] = replace(migrations[-1], pause_s=pause_s)
        self._metrics.migrations.pause.observe(pause_s)
        self._is_moving = self._has_switched = False

    def first_written(self) -> None:
        """The first token of the response was written to the client."""
        self.record.mark(TracePhase.FIRST_WRITE)

    # -- the end

    def finished(self, finish_reasons: list[str]) -> None:
        """Every choice is complete."""
        self.record.finish_reasons = finish_reasons
        self._end(_S.FINISHED, ",".join(finish_reasons))

    def failed(self, error: PdserveError) -> None:
        """The request has failed; the client gets `error`."""
        if isinstance(error, Overloaded):
            self._metrics.rejected("displaced" if isinstance(error, Displaced) else "queue_timeout")
        self.record.error = str(error)
        self._end(_S.FAILED, type(error).__name__)

    def ended_early(self, cause: EndedEarly | None = None) -> None:
        """The work was ended by `cause`; None: the client has left. Ignored if the request has ended already."""
        if self.record.state.is_final:
            return
        self._metrics.ended_early("disconnected" if cause is None else reason_of(cause))
        if cause is None or isinstance(cause, Cancelled):
            self.record.error = None if cause is None else str(cause)
            self._end(_S.CANCELLED, "cancelled")
        else:
            self.failed(cause)

    def _end(self, state: RequestState, outcome: str) -> None:
        if self.record.migrations and self.record.migrations[-1].outcome is None:
            self.moved(MigrationOutcome.ENDED)
        self.record.mark(TracePhase.FINISH)
        self.record.move(state, outcome=outcome)
        self._store.put(self.record.progress, json.dumps(self.record.as_json()))
        self._metrics.ended(self.record)
        self._trace.end(self.record)
        log.info("request_ended", **self.record.summary())

    def _move(self, state: RequestState, worker: WorkerRecord | None = None) -> None:
        self.record.move(state, worker=worker)
        self._store.put(self.record.progress)

    def _set_cached(self, cached_tokens: int) -> None:
        """The client pays for the prompt as it was computed for the first token, whatever is computed again later."""
        if not (self.record.completion_tokens or self._is_scored):
            self.record.cached_tokens = cached_tokens

    def _reserved(self, worker: WorkerRecord) -> None:
        if self.record.state in (_S.QUEUED, _S.SCORING, _S.RETRYING):
            self._move(_S.RESERVED, worker)
        self.record.mark(TracePhase.RESERVED)

    def _fall_back(self, reason: str, worker: WorkerRecord) -> None:
        self.record.fallbacks.append(self.record.incident(reason, worker.worker_id, None))
        self._metrics.fell_back(reason)
        self._local_prefill_reason = LocalPrefillReason.FALLBACK
