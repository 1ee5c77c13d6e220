"""The spans of one request on a decode worker, made of the times at which its session handled its events.

decode worker        from the call's arrival to its end
  reserve            until blocks are granted, or until the first step of a prompt computed here
  receive            one per ticket, until the transfer is verified; the prefill worker's `wire` is below it
  prefill            only where the prompt is computed here, until its first token
  decode             from the verified transfer, or the first token of a prompt computed here, to the end
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvtransfer.handover.reservation import Received
from pdserve.base.trace_context import TraceContext
from pdserve.observe.tracing.spans import NO_TRACER, Attribute, Span, SpanEvent, SpanKind, Tracer, unix_offset_s


@dataclass(slots=True, kw_only=True)
class _Reception:
    """What became of one ticket. Times are the event loop's, in seconds."""

    context: TraceContext | None
    granted_at: float
    ended_at: float | None = None
    received: Received | None = None


@dataclass(slots=True, kw_only=True)
class DecodeTrace:
    """The times of one request's events here. Belongs to its session; times are the event loop's, in seconds."""

    opened_at: float
    tracer: Tracer = NO_TRACER
    #: The router's call; None without a trace.
    parent: TraceContext | None = None
    #: The span of the whole call.
    context: TraceContext | None = None
    #: Start of the first step that computed something of the request.
    started_at: float | None = None
    first_tokens_at: float | None = None
    _receptions: list[_Reception] = field(default_factory=list)

    def join(self, tracer: Tracer, parent: TraceContext | None) -> None:
        """The request came within `parent`, the router's call."""
        self.tracer, self.parent = tracer, parent
        self.context = None if parent is None else tracer.start(parent)

    def granted(self, now: float) -> TraceContext | None:
        """Blocks wait for a transfer from now on. Returns the context for its ticket."""
        self.reception_ended(now)
        context = self.tracer.child(self.context)
        self._receptions.append(_Reception(context=context, granted_at=now))
        return context

    def reception_ended(self, now: float, received: Received | None = None) -> None:
        """The latest ticket was used, or is not good any more."""
        if self._receptions and self._receptions[-1].ended_at is None:
            self._receptions[-1].ended_at = now
            self._receptions[-1].received = received

    def end(self, attributes: dict[str, Attribute], error: str | None) -> None:
        """Gives the spans of a request that has ended to the tracer, if it wants them."""
        if self.context is None or self.parent is None or not self.tracer.records(self.context):
            return
        clock = asyncio.get_running_loop().time
        now, to_unix = clock(), unix_offset_s(clock)
        self.reception_ended(now)
        whole = Span(
            name="decode worker",
            context=self.context,
            parent_id=self.parent.span_id,
            start=self.opened_at + to_unix,
            end=now + to_unix,
            kind=SpanKind.SERVER,
            attributes=attributes,
            error=error,
        )
        self.tracer.emit([whole, *self._phases(self.context, now, to_unix)])

    def _phases(self, whole: TraceContext, now: float, to_unix: float) -> Iterator[Span]:
        def child(name: str, start: float, end: float, events: tuple[SpanEvent, ...] = ()) -> Span:
            context = whole.child()
            return Span(
                name=name,
                context=context,
                parent_id=whole.span_id,
                start=start + to_unix,
                end=end + to_unix,
                events=events,
            )

        started_at = now if self.started_at is None else self.started_at
        yield child("reserve", self.opened_at, self._receptions[0].granted_at if self._receptions else started_at)
        for reception in self._receptions:
            yield _receive(reception, whole, to_unix)
        received_at = self._received_at
        events = [("first step", self.started_at), ("first token", self.first_tokens_at)]
        marks = tuple(SpanEvent(name=name, at=at + to_unix) for name, at in events if at is not None)
        if received_at is not None:
            yield child("decode", received_at, now, marks)
        elif self.started_at is not None:
            yield child("prefill", started_at, self.first_tokens_at or now, marks)
            if self.first_tokens_at is not None:
                yield child("decode", self.first_tokens_at, now)

    @property
    def _received_at(self) -> float | None:
        """When a transfer was verified; None if none was."""
        return next((each.ended_at for each in self._receptions if each.received is not None), None)


def _receive(reception: _Reception, whole: TraceContext, to_unix: float) -> Span:
    assert reception.context is not None
    assert reception.ended_at is not None
    received = reception.received
    attributes: dict[str, Attribute] = {}
    if received is not None:
        attributes = {
            "pdserve.received_bytes": received.received_bytes,
            "pdserve.received_blocks": received.received_blocks,
            "pdserve.receive_s": received.receive_s,
        }
    return Span(
        name="receive",
        context=reception.context,
        parent_id=whole.span_id,
        start=reception.granted_at + to_unix,
        end=reception.ended_at + to_unix,
        attributes=attributes,
        error=None if received is not None else "not received",
    )
