"""The spans of one prompt's request as the router saw it, made of its decision record once it has ended.

generate                     from accept to finish; events: first token, first write, retries, fallbacks
  queue                      the admission queue
  call decode worker         one per decode worker that was tried; the worker's own spans are below it
  call prefill worker        one per prefill worker that was tried, its chunks as events; its own spans below it
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from pdserve.base.trace_context import TraceContext
from pdserve.observe.tracing.spans import NO_TRACER, Attribute, Span, SpanEvent, SpanKind, Tracer
from router_svc.records.decisions import Decision, chunks_of
from router_svc.records.events import MigrationOutcome, WorkerChosen
from router_svc.records.milestones import Milestone, is_commit
from router_svc.records.record import Record
from router_svc.records.request_state import RequestState

PROVIDER = "pdserve"


@dataclass(slots=True, kw_only=True)
class RequestTrace:
    """The span contexts of one prompt's request. Owned by its journal."""

    tracer: Tracer = NO_TRACER
    #: The span of the client's request, in which this one's is.
    parent: TraceContext | None = None
    model_name: str = ""
    #: The prompt's own span.
    context: TraceContext | None = field(init=False)

    def __post_init__(self) -> None:
        self.context = self.tracer.child(self.parent)

    def start_call(self) -> TraceContext | None:
        """The context for the call to a worker that was just chosen."""
        return self.tracer.child(self.context)

    def end(self, record: Record) -> None:
        """Gives the spans of an ended request to the tracer, if it wants them."""
        if self.tracer.records(self.context):
            self.tracer.emit(list(self._spans(record)))

    def _spans(self, record: Record) -> Iterator[Span]:
        assert self.context is not None
        assert self.parent is not None
        reached, accepted_at = record.milestones, record.accepted_at
        end = reached[Milestone.FINISH]
        operation = "chat" if "chat" in record.endpoint else "text_completion"
        gen_ai = _gen_ai(record, operation, self.model_name) if self.tracer.gen_ai else {}
        yield Span(
            name=f"{operation} {self.model_name}" if self.tracer.gen_ai else "generate",
            context=self.context,
            parent_id=self.parent.span_id,
            start=accepted_at,
            end=accepted_at + end,
            attributes=_attributes(record) | gen_ai,
            events=tuple(_events(record)),
            error=record.progress.outcome if record.state is RequestState.FAILED else None,
        )
        yield Span(
            name="queue",
            context=self.context.child(),
            parent_id=self.context.span_id,
            start=accepted_at,
            end=accepted_at + reached.get(Milestone.ADMITTED, end),
        )
        for decision, (logged, _) in zip(record.decisions, record.log.of(WorkerChosen), strict=True):
            assert logged.call is not None
            yield _call_span(record, decision, logged.call, self.context)


def _call_span(record: Record, decision: Decision, context: TraceContext, parent: TraceContext) -> Span:
    accepted_at, (end, error) = record.accepted_at, _end_of(record, decision)
    is_prefill = decision.tier == "prefill"
    chunks = [chunk for chunk in chunks_of(record.log) if is_prefill and decision.at <= chunk.at <= end]
    return Span(
        name=f"call {decision.tier} worker",
        context=context,
        parent_id=parent.span_id,
        start=accepted_at + decision.at,
        end=accepted_at + end,
        kind=SpanKind.CLIENT,
        attributes={
            "pdserve.worker": decision.worker,
            "pdserve.epoch": decision.epoch,
            "pdserve.attempt": decision.attempt,
            "pdserve.why": decision.why,
        },
        events=tuple(
            SpanEvent(
                name="chunk", at=accepted_at + chunk.at, attributes={"pdserve.computed_tokens": chunk.computed_tokens}
            )
            for chunk in chunks
        ),
        error=error,
    )


def _end_of(record: Record, decision: Decision) -> tuple[float, str | None]:
    """When the call to a worker ended, in seconds since the request was accepted, and the reason if it failed."""
    for retry in record.retries:
        is_its_attempt = retry.attempt == decision.attempt or decision.tier == "decode"
        if retry.worker == decision.worker and retry.at >= decision.at and is_its_attempt:
            return retry.at, retry.reason
    end = record.milestones[Milestone.FINISH]
    if decision.tier == "prefill":
        reached = (logged.at for logged in record.log if is_commit(logged.event) and logged.at >= decision.at)
        return next(reached, end), None
    for move in record.migrations:
        if move.outcome is None or move.ended_at is None or move.ended_at < decision.at:
            continue
        if move.outcome.has_moved and move.source == decision.worker:
            return move.ended_at, move.outcome if move.error else None
        if move.outcome is MigrationOutcome.FAILED and move.target == decision.worker and move.at <= decision.at:
            return move.ended_at, move.outcome
    return end, None


def _events(record: Record) -> Iterator[SpanEvent]:
    at = record.accepted_at
    for milestone in (Milestone.FIRST_TOKEN, Milestone.FIRST_WRITE, Milestone.FIRST_DECODE):
        if milestone in record.milestones:
            yield SpanEvent(name=milestone.value, at=at + record.milestones[milestone])
    for name, incidents in (("retry", record.retries), ("fallback", record.fallbacks)):
        for incident in incidents:
            attributes = {"pdserve.reason": incident.reason, "pdserve.worker": incident.worker or ""}
            yield SpanEvent(name=name, at=at + incident.at, attributes=attributes)


def _attributes(record: Record) -> dict[str, Attribute]:
    found: dict[str, Attribute] = {
        "pdserve.request_id": record.request_id,
        "pdserve.endpoint": record.endpoint,
        "pdserve.state": record.state.value,
        "pdserve.attempts": record.attempt,
        "pdserve.prompt_tokens": record.prompt_tokens,
        "pdserve.cached_tokens": record.cached_tokens,
        "pdserve.completion_tokens": record.completion_tokens,
        "pdserve.max_tokens": record.max_tokens,
        "pdserve.n": record.n,
        "pdserve.finish_reasons": _finish_reasons(record),
    }
    found |= {f"pdserve.{phase}_s": spent for phase, spent in record.seconds_in().items()}
    if record.prefill.tier is not None:
        found["pdserve.prefilled_by"] = record.prefill.tier
    if record.prefill.local_reason is not None:
        found["pdserve.local_prefill_reason"] = record.prefill.local_reason.value
    return found


def _gen_ai(record: Record, operation: str, model_name: str) -> dict[str, Attribute]:
    """The attributes of OpenTelemetry's conventions for generative AI, which are not stable yet."""
    found: dict[str, Attribute] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": model_name,
        "gen_ai.request.max_tokens": record.max_tokens,
        "gen_ai.request.choice.count": record.n,
        "gen_ai.response.id": record.request_id,
        "gen_ai.response.model": model_name,
        "gen_ai.response.finish_reasons": _finish_reasons(record),
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.output_tokens": record.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": record.cached_tokens,
    }
    if Milestone.FIRST_WRITE in record.milestones:
        found["gen_ai.response.time_to_first_chunk"] = record.milestones[Milestone.FIRST_WRITE]
    return found


def _finish_reasons(record: Record) -> list[str]:
    return [] if record.end is None else [*record.end.finish_reasons]
