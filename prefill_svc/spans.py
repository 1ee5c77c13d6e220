"""The spans of one prompt on a prefill worker, made of the times that its session keeps anyway.

prefill worker       from the call's arrival to its end
  prefill queue      until the prompt's first step
  prefill            the steps that compute it, with its chunks as events
  commit             from the end of the last step until the decode worker has verified the transfer
wire                 from the first message to the end of the last one; below the decode worker's reception
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvtransfer.handover.send_path import SendStats
from kvtransfer.handover.ticket import Ticket
from pdserve.base.trace_context import TraceContext
from pdserve.observe.tracing.spans import Attribute, Span, SpanEvent, SpanKind, Tracer, unix_offset_s

#: Later chunks have no events.
MAX_CHUNKS = 256


@dataclass(slots=True, kw_only=True)
class PromptTimes:
    """Times on the event loop's clock, in seconds; 0 for what has not happened."""

    accepted: float
    started: float = 0.0
    computed: float = 0.0
    committed: float = 0.0
    #: Ends of the first chunks, with the prompt tokens that were computed by then.
    chunks: list[tuple[float, int]] = field(default_factory=list)

    def add_chunk(self, at: float, num_computed: int) -> None:
        """A chunk was computed."""
        if len(self.chunks) < MAX_CHUNKS:
            self.chunks.append((at, num_computed))


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTrace:
    """The spans of one prompt."""

    tracer: Tracer
    #: The router's call; None without a trace.
    parent: TraceContext | None
    #: The span of the whole call.
    context: TraceContext | None

    @classmethod
    def start(cls, tracer: Tracer, parent: TraceContext | None) -> PromptTrace:
        """The trace of a prompt that the router sent within `parent`."""
        return cls(tracer=tracer, parent=parent, context=None if parent is None else tracer.start(parent))

    def end(
        self,
        times: PromptTimes,
        attributes: dict[str, Attribute],
        *,
        ticket: Ticket | None,
        sent: SendStats | None,
        error: str | None,
    ) -> None:
        """Gives the spans of a prompt that has ended to the tracer, if it wants them."""
        if self.context is None or self.parent is None or not self.tracer.records(self.context):
            return
        clock = asyncio.get_running_loop().time
        spans = _Spans(context=self.context, times=times, now=clock(), to_unix=unix_offset_s(clock))
        whole = spans.whole(self.parent, attributes, error)
        wire = [] if ticket is None or sent is None else spans.wire(ticket, sent)
        self.tracer.emit([whole, *spans.phases(), *wire])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Spans:
    context: TraceContext
    times: PromptTimes
    now: float
    #: Added to the event loop's clock, gives Unix time.
    to_unix: float

    def whole(self, parent: TraceContext, attributes: dict[str, Attribute], error: str | None) -> Span:
        return Span(
            name="prefill worker",
            context=self.context,
            parent_id=parent.span_id,
            start=self.times.accepted + self.to_unix,
            end=self.now + self.to_unix,
            kind=SpanKind.SERVER,
            attributes=attributes,
            error=error,
        )

    def phases(self) -> Iterator[Span]:
        times = self.times
        yield self._child("prefill queue", times.accepted, times.started or self.now)
        if not times.started:
            return
        chunks = tuple(
            SpanEvent(name="chunk", at=at + self.to_unix, attributes={"pdserve.computed_tokens": num_computed})
            for at, num_computed in times.chunks
        )
        yield self._child("prefill", times.started, times.computed or self.now, chunks)
        if times.committed:
            yield self._child("commit", times.computed, times.committed)

    def wire(self, ticket: Ticket, sent: SendStats) -> Iterator[Span]:
        """Nothing if nothing was sent. Without a trace in the ticket, the span is below the whole."""
        if sent.first_started_at is None:
            return
        parent = ticket.trace or self.context
        yield Span(
            name="wire",
            context=TraceContext(parent.trace_id, self.context.child().span_id, True),
            parent_id=parent.span_id,
            start=sent.first_started_at + self.to_unix,
            end=(self.now if sent.last_done_at is None else sent.last_done_at) + self.to_unix,
            attributes={
                "pdserve.transport": ticket.transport,
                "pdserve.decode_worker": ticket.worker_id,
                "pdserve.sent_bytes": sent.sent_bytes,
                "pdserve.sent_blocks": sent.sent_blocks,
                "pdserve.busy_s": sent.busy_s,
            },
            link=self.context if parent is not self.context else None,
        )

    def _child(self, name: str, start: float, end: float, events: tuple[SpanEvent, ...] = ()) -> Span:
        return Span(
            name=name,
            context=self.context.child(),
            parent_id=self.context.span_id,
            start=start + self.to_unix,
            end=end + self.to_unix,
            events=events,
        )
