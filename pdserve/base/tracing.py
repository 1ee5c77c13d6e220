"""Traces of requests over several processes: W3C trace contexts, spans as values, and the interface that takes them.

Nothing here knows OpenTelemetry: `pdserve.base.otlp` does, and is imported only where spans are exported. Services make
spans of the times they keep anyway, once a request has ended. A request without a sampled context costs a comparison.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Protocol

#: Name of the HTTP header and of the gRPC metadata that carry a context.
TRACEPARENT = "traceparent"

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)
_NO_TRACE, _NO_SPAN = "0" * 32, "0" * 16
_SAMPLED = 0x01
#: Longest header that is looked at: later versions may append fields.
_MAX_TRACEPARENT = 256

Attribute = str | bool | int | float | Sequence[str]


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A span's position in its trace, as other processes get it. Ids are lower-case hexadecimal."""

    trace_id: str
    span_id: str
    is_sampled: bool

    @property
    def traceparent(self) -> str:
        """The context as the W3C's header."""
        return f"00-{self.trace_id}-{self.span_id}-0{int(self.is_sampled)}"

    def child(self) -> TraceContext:
        """The context of a new span below this one."""
        return TraceContext(self.trace_id, secrets.token_hex(8), self.is_sampled)


def parse_traceparent(text: str | None) -> TraceContext | None:
    """The context of a header; None without one, or for one that is malformed: a request is never refused for it.

    Source: W3C Trace Context, https://www.w3.org/TR/trace-context/.
    """
    if not text or len(text) > _MAX_TRACEPARENT:
        return None
    match = _TRACEPARENT.fullmatch(text.strip())
    if match is None:
        return None
    version, trace_id, span_id, flags, more = match.groups()
    if version == "ff" or (version == "00" and more) or trace_id == _NO_TRACE or span_id == _NO_SPAN:
        return None
    return TraceContext(trace_id, span_id, bool(int(flags, 16) & _SAMPLED))


def traceparent_of(context: TraceContext | None) -> str:
    """The header for a context; empty without one."""
    return "" if context is None else context.traceparent


class SpanKind(Enum):
    """The side of a call that a span describes."""

    INTERNAL = "internal"
    SERVER = "server"
    CLIENT = "client"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanEvent:
    """Something that happened at one time within a span."""

    name: str
    #: Unix time.
    at: float
    attributes: Mapping[str, Attribute] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A span that has ended. It never holds text of a prompt or of an answer."""

    name: str
    context: TraceContext
    #: Span id of the parent, in the same trace; None for a root.
    parent_id: str | None
    #: Unix times.
    start: float
    end: float
    kind: SpanKind = SpanKind.INTERNAL
    attributes: Mapping[str, Attribute] = field(default_factory=dict)
    events: tuple[SpanEvent, ...] = ()
    #: Why it failed, as one word; None when it did not.
    error: str | None = None
    #: Another span that it has to do with.
    link: TraceContext | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """Which traces are recorded."""

    #: Share of the traces that start here.
    ratio: float = 1.0
    #: Whether a request that brings a context is recorded exactly if its caller recorded it.
    parent_based: bool = True

    def samples(self, trace_id: str, parent: TraceContext | None) -> bool:
        """Whether to record a request of this trace. All processes with one ratio decide alike."""
        if parent is not None and self.parent_based:
            return parent.is_sampled
        return int(trace_id[16:], 16) < self.ratio * 2**64


class Tracer(Protocol):
    """Takes spans. Its methods are called on the event loop and never wait."""

    #: Whether spans carry the attributes of OpenTelemetry's conventions for generative AI.
    gen_ai: bool
    #: Spans that were given to the collector, and spans that were lost.
    exported: int

    @property
    def dropped(self) -> int:
        """Spans that were not exported: the queue was full, or the collector did not take them."""

    def start(self, parent: TraceContext | None) -> TraceContext | None:
        """The context of the first span of a request in this process.

        `parent` itself where nothing is recorded, so that it is passed on; None where no trace is.
        """

    def child(self, context: TraceContext | None) -> TraceContext | None:
        """The context of a span below `context`; `context` itself where nothing is recorded."""

    def records(self, context: TraceContext | None) -> bool:
        """Whether spans with this context are wanted."""

    def emit(self, spans: Sequence[Span]) -> None:
        """Takes spans that have ended. Never blocks: spans beyond the queue's limit are dropped and counted."""


class NoTracer:
    """Records nothing, and passes on the contexts of others."""

    gen_ai = False
    exported = 0
    dropped = 0

    def start(self, parent: TraceContext | None) -> TraceContext | None:
        """`parent`."""
        return parent

    def child(self, context: TraceContext | None) -> TraceContext | None:
        """`context`."""
        return context

    def records(self, context: TraceContext | None) -> bool:
        """Never."""
        return False

    def emit(self, spans: Sequence[Span]) -> None:
        """Nothing."""


NO_TRACER: Tracer = NoTracer()


class SamplingTracer:
    """Decides what is recorded. `emit` is left to the class that exports."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def start(self, parent: TraceContext | None) -> TraceContext | None:
        """As `Tracer.start`."""
        if parent is not None:
            is_sampled = self._sampler.samples(parent.trace_id, parent)
            return replace(parent.child(), is_sampled=True) if is_sampled else parent
        trace_id = secrets.token_hex(16)
        return TraceContext(trace_id, secrets.token_hex(8), True) if self._sampler.samples(trace_id, None) else None

    def child(self, context: TraceContext | None) -> TraceContext | None:
        """As `Tracer.child`."""
        return context.child() if context is not None and context.is_sampled else context

    def records(self, context: TraceContext | None) -> bool:
        """As `Tracer.records`."""
        return context is not None and context.is_sampled
