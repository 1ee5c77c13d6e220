"""Spans leave by a thread: full queues and absent collectors cost spans, never requests."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest

from pdserve.base.trace_context import TraceContext
from pdserve.observe.tracing import export
from pdserve.observe.tracing.export import ExportingTracer
from pdserve.observe.tracing.otlp import OtlpExporter
from pdserve.observe.tracing.spans import Sampler, Span, SpanEvent, SpanKind
from tests.support.deadline import DEADLINE_S
from tests.support.spans import Collector, collecting

CONTEXT = TraceContext("ab" * 16, "cd" * 8, True)


def span(name: str = "a") -> Span:
    return Span(name=name, context=CONTEXT.child(), parent_id=CONTEXT.span_id, start=10.0, end=11.5)


class Exporter:
    """Takes spans while `reason` is None, and none while `gate` is closed."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.reached, self.left = threading.Semaphore(0), threading.Semaphore(0)
        self.taken: list[Span] = []

    def export(self, spans: Sequence[Span]) -> str | None:
        self.reached.release()
        assert self.gate.wait(DEADLINE_S)
        if self.reason is None:
            self.taken.extend(spans)
        self.left.release()
        return self.reason

    def close(self) -> None:
        self.gate.set()


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Exporter:
    monkeypatch.setattr(export, "DELAY_S", 0.0)
    return Exporter()


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as found:
        yield found


def tracer_of(exporter: export.SpanExporter, **options: int) -> ExportingTracer:
    return ExportingTracer(exporter, Sampler(), **options)


def test_every_span_is_exported_before_the_tracer_is_closed(exporter: Exporter) -> None:
    tracer = tracer_of(exporter)
    for number in range(3 * export.BATCH):
        tracer.emit([span(str(number))])
    tracer.close()
    assert [each.name for each in exporter.taken] == [str(number) for number in range(3 * export.BATCH)]
    assert (tracer.exported, tracer.dropped) == (3 * export.BATCH, 0)


def test_spans_beyond_the_limit_are_dropped_and_counted(exporter: Exporter) -> None:
    exporter.gate.clear()
    tracer = tracer_of(exporter, max_waiting=4)
    tracer.emit([span()])
    assert exporter.reached.acquire(timeout=DEADLINE_S)
    # The first one is being exported. None of these calls waits, although the exporter does.
    for _ in range(3):
        tracer.emit([span(), span()])
    assert tracer.dropped == 2
    exporter.gate.set()
    tracer.close()
    assert (tracer.exported, tracer.dropped) == (5, 2)


def test_spans_that_a_collector_refuses_are_counted_and_said_once(
    exporter: Exporter, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    tracer = tracer_of(exporter)
    for reason in ("away", "away", None):
        exporter.reason = reason
        tracer.emit([span()])
        assert exporter.left.acquire(timeout=DEADLINE_S)
    tracer.close()
    assert (tracer.exported, tracer.dropped) == (1, 2)
    assert [record.message for record in caplog.records] == ["span_export_failed", "span_export_recovered"]


def test_closing_does_not_wait_for_a_collector_that_hangs(exporter: Exporter, caplog: pytest.LogCaptureFixture) -> None:
    exporter.gate.clear()
    tracer = tracer_of(exporter)
    tracer.emit([span()])
    assert exporter.reached.acquire(timeout=DEADLINE_S)
    tracer.close(timeout_s=0.01)
    assert "spans_not_flushed" in caplog.text


def test_a_span_arrives_at_a_collector_with_all_it_has(collector: Collector) -> None:
    exporter = OtlpExporter(f"{collector.url}/v1/traces", service_name="pdserve-router", instance="r0")
    whole = Span(
        name="wire",
        context=CONTEXT,
        parent_id="ef" * 8,
        start=1000.25,
        end=1000.5,
        kind=SpanKind.SERVER,
        attributes={"pdserve.sent_bytes": 7, "pdserve.finish_reasons": ["stop"]},
        events=(SpanEvent(name="chunk", at=1000.375, attributes={"pdserve.computed_tokens": 256}),),
        error="peer_lost",
        link=TraceContext(CONTEXT.trace_id, "12" * 8, True),
    )
    assert exporter.export([whole]) is None
    exporter.close()
    [request] = collector.requests
    [resource] = request.resource_spans
    attributes = {each.key: each.value.string_value for each in resource.resource.attributes}
    assert (attributes["service.name"], attributes["service.instance.id"]) == ("pdserve-router", "r0")
    [sent] = resource.scope_spans[0].spans
    assert (sent.trace_id.hex(), sent.span_id.hex(), sent.parent_span_id.hex()) == ("ab" * 16, "cd" * 8, "ef" * 8)
    assert (sent.start_time_unix_nano, sent.end_time_unix_nano) == (1000250000000, 1000500000000)
    assert (sent.kind, sent.status.code, sent.status.message) == (2, 2, "peer_lost")
    assert {each.key for each in sent.attributes} == {"pdserve.sent_bytes", "pdserve.finish_reasons"}
    [event] = sent.events
    assert (event.name, event.time_unix_nano) == ("chunk", 1000375000000)
    assert sent.links[0].span_id.hex() == "12" * 8


def test_a_collector_that_refuses_is_a_reason(collector: Collector) -> None:
    collector.status = 400
    exporter = OtlpExporter(f"{collector.url}/v1/traces", service_name="pdserve-router", instance="r0")
    reason = exporter.export([span()])
    exporter.close()
    assert reason is not None
    assert "400" in reason


def test_a_collector_that_is_away_is_a_reason_and_closing_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    with collecting() as gone:
        url = gone.url
    exporter = OtlpExporter(f"{url}/v1/traces", service_name="pdserve-router", instance="r0")
    reasons: list[str | None] = []
    thread = threading.Thread(target=lambda: reasons.append(exporter.export([span()])))
    thread.start()
    exporter.close()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()
    assert reasons[0]
