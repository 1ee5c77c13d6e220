"""One trace over all processes of a real cluster, sent to a collector, and what it costs the answer: nothing."""

from __future__ import annotations

import itertools
import json
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from pdserve.base.trace_context import TraceContext
from pdserve.cli.router_client import get_model
from pdserve.cli.trace_view import RequestTrace
from pdserve.observe.tracing.spans import Span
from tests.support.cluster import MODEL, SETTLE_S, Cluster, running_cluster
from tests.support.default_model import EXACT_DTYPE, model_for_depth
from tests.support.spans import Collector, collecting, tree

ROOT = "POST /v1/completions"
REQUEST = f"{ROOT}/generate"
DECODE, PREFILL = f"{REQUEST}/call decode worker/decode worker", f"{REQUEST}/call prefill worker/prefill worker"
#: Every path of a request that a prefill worker prefills, with the service that has the last span of the path.
HANDED_OVER = {
    ROOT: "pdserve-router",
    REQUEST: "pdserve-router",
    f"{REQUEST}/queue": "pdserve-router",
    f"{REQUEST}/call decode worker": "pdserve-router",
    DECODE: "pdserve-decode",
    f"{DECODE}/reserve": "pdserve-decode",
    f"{DECODE}/receive": "pdserve-decode",
    f"{DECODE}/receive/wire": "pdserve-prefill",
    f"{DECODE}/decode": "pdserve-decode",
    f"{REQUEST}/call prefill worker": "pdserve-router",
    PREFILL: "pdserve-prefill",
    f"{PREFILL}/prefill queue": "pdserve-prefill",
    f"{PREFILL}/prefill": "pdserve-prefill",
    f"{PREFILL}/commit": "pdserve-prefill",
}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    """What the cluster sends its spans to."""
    with collecting() as found:
        yield found


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[Cluster]:
    """A cluster in which a prefill worker computes every prompt, and only sampled contexts of clients are traced."""
    flags = ("--otlp-endpoint", collector.url, "--trace-sample-ratio", "0", "--log-format", "json")
    flags += ("--local-prefill-threshold", "0", "--dtype", EXACT_DTYPE, "--kv-cache-memory", "64MiB")
    model = model_for_depth(tmp_path_factory.mktemp("model"))
    with running_cluster(tmp_path_factory.mktemp("traced"), *flags, model=model) as started:
        yield started


def complete(cluster: Cluster, first: int, trace: TraceContext | None = None) -> Any:
    headers = {} if trace is None else {"traceparent": trace.traceparent}
    prompt = [first, *((first * 37 + 11 * index) % 40_000 + 100 for index in range(1, 200))]
    client = cluster.client()
    return client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=64, temperature=1, seed=7, extra_headers=headers
    )


@dataclass(frozen=True, slots=True)
class Traced:
    """A traced completion, and those before it whose prefill worker learned of its commit too late to report it."""

    answer: Any
    trace: TraceContext
    num_before: int


def complete_traced(cluster: Cluster, first: int) -> Traced:
    """A completion of which every span is certain: repeated until the prefill worker has reported the end of its call.

    The router does not wait for that once an answer is complete. Without it, the worker may have no span of the commit.
    """
    for number in itertools.count():
        trace = TraceContext(secrets.token_hex(16), "2b" * 8, True)
        answer = complete(cluster, first + 100 * number, trace)
        if "commit_s" in get_model(cluster.base_url, f"/v1/requests/{answer.id}/trace", RequestTrace).reported:
            return Traced(answer, trace, number)
    raise AssertionError("unreachable")


def spans_of(cluster: Cluster, collector: Collector, trace: TraceContext, count: int) -> list[tuple[str, Span]]:
    """The spans of a trace once `count` have arrived."""

    def found() -> list[tuple[str, Span]]:
        return [(service, span) for service, span in collector.spans() if span.context.trace_id == trace.trace_id]

    with collector.arrived:
        have_arrived = collector.arrived.wait_for(lambda: len(found()) >= count, timeout=SETTLE_S)
    names = [(service, span.name, span.error) for service, span in found()]
    assert have_arrived, f"{len(names)} of {count} spans: {names}; {cluster.describe()}\n{cluster.logs()}"
    return found()


def test_a_request_is_one_trace_over_router_prefill_wire_and_decode(cluster: Cluster, collector: Collector) -> None:
    trace = complete_traced(cluster, 2001).trace
    spans = spans_of(cluster, collector, trace, len(HANDED_OVER))
    assert tree(span for _, span in spans) == {trace.trace_id: sorted(HANDED_OVER)}
    names = {path: path.rpartition("/")[2] for path in HANDED_OVER}
    services = {(service, span.name) for service, span in spans if span.name != ROOT}
    assert services == {(service, names[path]) for path, service in HANDED_OVER.items() if path != ROOT}
    [root] = [span for _, span in spans if span.name == ROOT]
    assert root.parent_id == trace.span_id


def test_tokens_are_the_same_with_and_without_a_trace(cluster: Cluster, collector: Collector) -> None:
    first = 2002
    before = {span.context.trace_id for _, span in collector.spans()}
    traced = complete_traced(cluster, first)
    plain = complete(cluster, first + 100 * traced.num_before)
    assert traced.answer.choices[0].text == plain.choices[0].text
    assert spans_of(cluster, collector, traced.trace, len(HANDED_OVER))
    # The cluster samples nothing by itself.
    new = {span.context.trace_id for _, span in collector.spans()} - before
    assert traced.trace.trace_id in new
    assert len(new) <= 1 + traced.num_before


def test_a_collector_that_takes_nothing_costs_spans_and_no_request(cluster: Cluster, collector: Collector) -> None:
    router = f"127.0.0.1:{cluster.port}"
    before = cluster.metric(router, "pdserve_spans_dropped_total")
    collector.status = 400
    try:
        traced = complete_traced(cluster, 2003)
        assert traced.answer.choices[0].text
        num_requests = traced.num_before + 1
        cluster.until(
            lambda: cluster.metric(router, "pdserve_spans_dropped_total") - before == 5 * num_requests,
            "the router's spans are dropped",
        )
        # Of each request before, the prefill worker has a span less.
        for tier, count in (("prefill", 4 * traced.num_before + 5), ("decode", 4 * num_requests)):
            cluster.until(
                lambda tier=tier, count=count: cluster.worker_metric(tier, "pdserve_spans_dropped_total") >= count,  # type: ignore[misc]
                f"the spans of {tier} are dropped",
            )
    finally:
        collector.status = 200


def test_every_log_line_is_an_object_and_those_of_a_request_have_its_trace(cluster: Cluster) -> None:
    trace = TraceContext("4d" * 16, "2b" * 8, True)
    answer = complete(cluster, 2004, trace)
    cluster.wait_idle()
    lines = {
        name: [json.loads(line) for line in (cluster.log_dir / f"{name}.log").read_text().splitlines()]
        for name in ("router", "prefill-0", "decode-0")
    }
    assert all(lines.values())
    [ended] = [line for line in lines["router"] if line.get("request_id") == answer.id]
    assert (ended["event"], ended["trace_id"]) == ("request_ended", trace.trace_id)
