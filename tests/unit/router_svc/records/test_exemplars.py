"""An exemplar leads to one request."""

from __future__ import annotations

import contextvars

import pytest
from prometheus_client import CollectorRegistry, Histogram

from pdserve.base.logs import trace_var
from pdserve.observe.tracing.spans import TraceContext
from router_svc.records.exemplars import exemplar_labels

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"


@pytest.mark.parametrize(("is_sampled", "labels"), [(True, {"trace_id": TRACE_ID}), (False, {"request_id": "cmpl-1"})])
def test_an_exemplar_names_the_trace_if_it_is_recorded_and_else_the_request(
    is_sampled: bool, labels: dict[str, str]
) -> None:
    def in_a_trace() -> dict[str, str]:
        trace_var.set(TraceContext(TRACE_ID, "00f067aa0ba902b7", is_sampled))
        return exemplar_labels("cmpl-1")

    assert contextvars.copy_context().run(in_a_trace) == labels
    assert exemplar_labels("cmpl-1") == {"request_id": "cmpl-1"}


def test_an_id_that_openmetrics_does_not_allow_is_left_out() -> None:
    histogram = Histogram("pdserve_test_seconds", "test", registry=CollectorRegistry())
    longest = "x" * (128 - len("request_id"))
    histogram.observe(1.0, exemplar_labels(longest))
    assert exemplar_labels(longest + "x") == {}
