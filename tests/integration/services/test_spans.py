"""A request's spans on both workers form one tree: reservation, reception, prefill, wire, commit, decode."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pdserve.base.errors import PdserveError
from pdserve.base.trace_context import TraceContext
from pdserve.observe.tracing.spans import Span
from pdserve.v1 import decode_pb2
from tests.integration.services.local_cluster import ALWAYS_LOCAL, LocalCluster, running_cluster
from tests.support.own_task import in_own_task
from tests.support.spans import KeepingTracer, tree
from tests.unit.model.tiny import save_model

PROMPT = [(7 * position) % 90 + 3 for position in range(45)]
CALLS = TraceContext("ab" * 16, "d0" * 8, True), TraceContext("ab" * 16, "f0" * 8, True)
#: Paths of the spans when the router's two calls are the roots.
HANDED_OVER = [
    "decode worker",
    "decode worker/decode",
    "decode worker/receive",
    "decode worker/receive/wire",
    "decode worker/reserve",
    "prefill worker",
    "prefill worker/commit",
    "prefill worker/prefill",
    "prefill worker/prefill queue",
]


class TracedCluster:
    """A cluster whose workers keep their spans."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster
        self.decode, self.prefill = KeepingTracer(), KeepingTracer()
        cluster.decode.tracer, cluster.prefill.tracer = self.decode, self.prefill

    async def spans(self) -> list[Span]:
        """All spans, once no request is left."""
        await self.cluster.all_free()
        return [*self.decode.spans, *self.prefill.spans]

    async def named(self, name: str) -> list[Span]:
        return [span for span in await self.spans() if span.name == name]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
async def traced(model: Path) -> AsyncIterator[TracedCluster]:
    async with in_own_task(running_cluster(model)) as cluster:
        yield TracedCluster(cluster)


def under(trace_id: str) -> tuple[TraceContext, TraceContext]:
    """The router's calls to the decode worker and to the prefill worker, in a trace."""
    return TraceContext(trace_id, "d0" * 8, True), TraceContext(trace_id, "f0" * 8, True)


async def test_a_handover_is_one_tree_with_the_wire_below_the_reception(traced: TracedCluster) -> None:
    to_decode, to_prefill = under("ab" * 16)
    request = traced.cluster.request(PROMPT)
    await request.start(trace=to_decode)
    done = await request.prefill(await request.ticket(), trace=to_prefill)
    await request.finish()
    spans = await traced.spans()
    assert tree(spans) == {"ab" * 16: HANDED_OVER}
    by_name = {span.name: span for span in spans}
    assert by_name["decode worker"].parent_id == to_decode.span_id
    assert by_name["prefill worker"].parent_id == to_prefill.span_id
    assert by_name["wire"].link == by_name["prefill worker"].context
    assert by_name["wire"].attributes["pdserve.sent_bytes"] == done.sent_bytes
    assert by_name["receive"].attributes["pdserve.received_bytes"] == done.sent_bytes
    chunks = [event.attributes["pdserve.computed_tokens"] for event in by_name["prefill"].events]
    assert chunks == [8, 16, 24, 32, 40, 45]
    assert [event.name for event in by_name["decode"].events] == ["first step", "first token"]


async def test_spans_lie_within_their_parents_and_follow_each_other(traced: TracedCluster) -> None:
    to_decode, to_prefill = under("ab" * 16)
    request = traced.cluster.request(PROMPT)
    await request.start(trace=to_decode)
    await request.prefill(await request.ticket(), trace=to_prefill)
    await request.finish()
    by_name = {span.name: span for span in await traced.spans()}
    #: Each worker reads its two clocks when it makes its spans.
    slack_s = 0.002
    for inner, outer in (
        ("reserve", "decode worker"),
        ("receive", "decode worker"),
        ("decode", "decode worker"),
        ("wire", "receive"),
        ("prefill", "prefill worker"),
        ("commit", "prefill worker"),
    ):
        assert by_name[outer].start - slack_s <= by_name[inner].start, inner
        assert by_name[inner].end <= by_name[outer].end + slack_s, inner
    in_order = ("reserve", "receive", "decode")
    assert [by_name[name].end for name in in_order[:-1]] == pytest.approx(
        [by_name[name].start for name in in_order[1:]], abs=slack_s
    )
    assert by_name["prefill queue"].end == pytest.approx(by_name["prefill"].start, abs=slack_s)


async def test_a_prompt_that_the_decode_worker_computes_has_no_reception(traced: TracedCluster) -> None:
    request = traced.cluster.request(PROMPT)
    await request.start(trace=CALLS[0], local_prefill_threshold=ALWAYS_LOCAL)
    await request.finish()
    assert tree(await traced.spans()) == {
        "ab" * 16: ["decode worker", "decode worker/decode", "decode worker/prefill", "decode worker/reserve"]
    }


async def test_a_request_for_one_token_has_no_wire(traced: TracedCluster) -> None:
    await traced.cluster.request(PROMPT, max_tokens=1).prefill(None, trace=CALLS[1])
    assert tree(await traced.spans()) == {
        "ab" * 16: ["prefill worker", "prefill worker/prefill", "prefill worker/prefill queue"]
    }


async def test_each_ticket_has_a_reception_of_its_own(traced: TracedCluster) -> None:
    request = traced.cluster.request(PROMPT)
    await request.start(trace=CALLS[0])
    first = await request.ticket()
    await request.send(renew_ticket=decode_pb2.RenewTicket(attempt=2))
    second = await request.ticket()
    await request.prefill(second, trace=CALLS[1])
    await request.finish()
    lost, used = sorted(await traced.named("receive"), key=lambda span: span.start)
    assert [lost.context.traceparent, used.context.traceparent] == [first.traceparent, second.traceparent]
    assert (lost.error, used.error) == ("not received", None)
    [wire] = await traced.named("wire")
    assert wire.parent_id == used.context.span_id


async def test_a_failed_call_says_why(traced: TracedCluster) -> None:
    request = traced.cluster.request(PROMPT)
    await request.start(trace=CALLS[0])
    ticket = await request.ticket()
    request.cancel()
    await traced.cluster.all_free()
    with pytest.raises(PdserveError):
        await request.prefill(ticket, trace=CALLS[1])
    [span] = await traced.named("prefill worker")
    assert span.error == "stale_error"


async def test_concurrent_requests_keep_their_traces(traced: TracedCluster) -> None:
    ids = [f"{number:032x}" for number in range(1, 9)]

    async def serve(trace_id: str, prompt: list[int]) -> dict[int, list[int]]:
        to_decode, to_prefill = under(trace_id)
        request = traced.cluster.request(prompt, request_id=trace_id)
        await request.start(trace=to_decode)
        await request.prefill(await request.ticket(), trace=to_prefill)
        return await request.finish()

    async with asyncio.TaskGroup() as group:
        for number, trace_id in enumerate(ids):
            group.create_task(serve(trace_id, [number + 3, *PROMPT[:20]]))
    spans = await traced.spans()
    assert tree(spans) == dict.fromkeys(ids, HANDED_OVER)
    owners = {(span.context.trace_id, span.attributes["pdserve.request_id"]) for span in spans if "worker" in span.name}
    assert owners == {(trace_id, trace_id) for trace_id in ids}


@pytest.mark.parametrize(
    "context", [None, TraceContext("ab" * 16, "d0" * 8, False)], ids=["no context", "an unsampled context"]
)
async def test_what_is_not_sampled_leaves_no_spans_and_the_same_tokens(
    traced: TracedCluster, context: TraceContext | None
) -> None:
    outputs = []
    for trace in (context, CALLS[0]):
        request = traced.cluster.request([*PROMPT, 9], temperature=1.0)
        await request.start(trace=trace)
        await request.prefill(await request.ticket(), trace=trace)
        outputs.append(await request.finish())
        if trace is context:
            assert await traced.spans() == []
    assert outputs[0] == outputs[1]
    assert await traced.spans() != []
