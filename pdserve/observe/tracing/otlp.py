"""Spans as OpenTelemetry's, sent by OTLP over HTTP: the only importer of OpenTelemetry, and imported only when on.

The exporter of OpenTelemetry reads further variables by itself: OTEL_EXPORTER_OTLP_HEADERS, _CERTIFICATE, _TIMEOUT,
_COMPRESSION and OTEL_RESOURCE_ATTRIBUTES.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

import pdserve
from pdserve.base.trace_context import TraceContext
from pdserve.observe.tracing import spans
from pdserve.observe.tracing.spans import Span

_KINDS = {
    spans.SpanKind.INTERNAL: SpanKind.INTERNAL,
    spans.SpanKind.SERVER: SpanKind.SERVER,
    spans.SpanKind.CLIENT: SpanKind.CLIENT,
}
_SCOPE = InstrumentationScope("pdserve", pdserve.__version__)


class _LastMessage(logging.Handler):
    """Keeps what the library last complained about. It logs at each attempt, which would bury our own lines."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Takes a line."""
        self.text = record.getMessage()


class OtlpExporter:
    """Implements `pdserve.observe.tracing.export.SpanExporter`."""

    def __init__(self, url: str, *, service_name: str, instance: str) -> None:
        """`url`: the collector's, with the path of traces."""
        self._resource = Resource.create(
            {
                "service.name": service_name,
                "service.version": pdserve.__version__,
                "service.instance.id": instance,
            }
        )
        self._said = _LastMessage()
        library = logging.getLogger("opentelemetry")
        library.handlers[:] = [self._said]
        library.propagate = False
        logging.getLogger("urllib3").setLevel(logging.ERROR)
        self._exporter = OTLPSpanExporter(endpoint=url)
        self._url = url

    def export(self, spans: Sequence[Span]) -> str | None:
        """As `SpanExporter.export`."""
        self._said.text = ""
        result = self._exporter.export([readable(span, self._resource) for span in spans])
        if result is SpanExportResult.SUCCESS:
            return None
        return self._said.text or f"{self._url} did not take the spans"

    def close(self) -> None:
        """As `SpanExporter.close`."""
        self._exporter.shutdown()  # type: ignore[no-untyped-call]


def readable(span: Span, resource: Resource) -> ReadableSpan:
    """A span as OpenTelemetry has it."""
    return ReadableSpan(
        name=span.name,
        context=_span_context(span.context),
        parent=None if span.parent_id is None else _context(span.context.trace_id, span.parent_id),
        resource=resource,
        attributes=span.attributes,
        events=[Event(event.name, event.attributes, _nanoseconds(event.at)) for event in span.events],
        links=() if span.link is None else (Link(_span_context(span.link)),),
        kind=_KINDS[span.kind],
        status=Status(StatusCode.UNSET) if span.error is None else Status(StatusCode.ERROR, span.error),
        start_time=_nanoseconds(span.start),
        end_time=_nanoseconds(max(span.start, span.end)),
        instrumentation_scope=_SCOPE,
    )


def _span_context(context: TraceContext) -> SpanContext:
    return _context(context.trace_id, context.span_id)


def _context(trace_id: str, span_id: str) -> SpanContext:
    return SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))


def _nanoseconds(unix_s: float) -> int:
    return int(unix_s * 1e9)
