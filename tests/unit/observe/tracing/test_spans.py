"""Trace contexts of the W3C, and who decides what is recorded."""

from __future__ import annotations

import pytest

from pdserve.base.trace_context import TraceContext, parse_traceparent, traceparent_of
from pdserve.observe.tracing.spans import NO_TRACER, Sampler
from tests.support.spans import KeepingTracer

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED = TraceContext(TRACE, SPAN, True)
UNSAMPLED = TraceContext(TRACE, SPAN, False)


@pytest.mark.parametrize("context", [SAMPLED, UNSAMPLED])
def test_a_context_survives_its_header(context: TraceContext) -> None:
    assert parse_traceparent(traceparent_of(context)) == context


@pytest.mark.parametrize(
    ("header", "is_sampled"),
    [(f"00-{TRACE}-{SPAN}-03", True), (f"cc-{TRACE}-{SPAN}-01-later-fields", True), (f" 00-{TRACE}-{SPAN}-02 ", False)],
)
def test_later_versions_and_flags_are_understood(header: str, is_sampled: bool) -> None:
    assert parse_traceparent(header) == TraceContext(TRACE, SPAN, is_sampled)


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "00",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-01-more",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01\nx",
        f"cc-{TRACE}-{SPAN}-01-{'x' * 300}",
    ],
)
def test_a_malformed_header_is_no_context(header: str | None) -> None:
    assert parse_traceparent(header) is None


def test_without_tracing_the_callers_context_is_passed_on() -> None:
    for context in (SAMPLED, UNSAMPLED, None):
        assert NO_TRACER.start(context) is context
        assert NO_TRACER.child(context) is context
        assert not NO_TRACER.records(context)


def test_a_sampled_caller_gets_a_span_below_its_own() -> None:
    tracer = KeepingTracer(ratio=0)
    context = tracer.start(SAMPLED)
    assert context is not None
    assert tracer.records(context)
    assert (context.trace_id, context.is_sampled) == (TRACE, True)
    assert context.span_id != SPAN


def test_what_the_caller_does_not_record_is_not_recorded_and_passed_on() -> None:
    tracer = KeepingTracer()
    assert tracer.start(UNSAMPLED) is UNSAMPLED
    assert tracer.child(UNSAMPLED) is UNSAMPLED
    assert not tracer.records(UNSAMPLED)


def test_a_request_without_a_caller_is_recorded_by_the_ratio() -> None:
    assert KeepingTracer(ratio=0).start(None) is None
    context = KeepingTracer(ratio=1).start(None)
    assert context is not None
    assert context.is_sampled


def test_the_share_of_recorded_traces_is_the_ratio() -> None:
    sampler = Sampler(ratio=0.25)
    ids = [f"{0:016x}{number << 54:016x}" for number in range(1024)]
    assert sum(sampler.samples(trace_id, None) for trace_id in ids) == 256


def test_a_sampler_without_parents_ignores_the_callers_decision() -> None:
    assert not Sampler(ratio=0, parent_based=False).samples(TRACE, SAMPLED)
    assert Sampler(ratio=1, parent_based=False).samples(TRACE, UNSAMPLED)
