"""Traces of requests over several processes: spans as values, and the interface that takes them.

Nothing here knows OpenTelemetry: `pdserve.observe.tracing.otlp` does, and is imported only where spans are exported.
Services make spans of the times they keep anyway, once a request has ended. A request without a sampled context costs a
comparison.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Protocol

from pdserve.base.trace_context import TraceContext

#: Limits for reading two clocks at one time.
_MAX_READINGS, _CLOSE_READINGS_S = 5, 50e-6

Attribute = str | bool | int | float | Sequence[str]


def unix_offset_s(clock: Callable[[], float]) -> float:
    """What has to be added to `clock` for Unix time. Reads again if the process was stopped between two readings."""
    offset_s, narrowest_s = 0.0, float("inf")
    for _ in range(_MAX_READINGS):
        before, unix, after = clock(), time.time(), clock()
        if after - before < narrowest_s:
            offset_s, narrowest_s = unix - (before + after) / 2, after - before
        if narrowest_s < _CLOSE_READINGS_S:
            break
    return offset_s


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
