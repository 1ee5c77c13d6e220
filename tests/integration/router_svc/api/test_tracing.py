"""The router's spans of a request, and the context that its workers get."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from pdserve.base.errors import RequestError
from pdserve.base.trace_context import TraceContext, parse_traceparent
from pdserve.cli.private_redis import PrivateRedis
from pdserve.observe.tracing.spans import NO_TRACER, Span, SpanKind
from pdserve.v1 import inference_pb2 as pb
from pdserve.v1 import inference_pb2_grpc
from tests.integration.router_svc.conftest import TWO_OF_EACH, ScriptedCluster, open_cluster
from tests.integration.router_svc.request.support import TEXT
from tests.integration.router_svc.script import failing, vanish
from tests.support.own_task import in_own_task
from tests.support.spans import KeepingTracer, tree
from tests.support.tiny_model import NAME

CLIENT = TraceContext("ab" * 16, "cd" * 8, True)
UNSAMPLED = TraceContext("ab" * 16, "cd" * 8, False)
COMPLETION = "POST /v1/completions"
PROMPT = "a prompt that no span may have"


@dataclass
class Traced:
    """A cluster whose router keeps its spans."""

    cluster: ScriptedCluster
    tracer: KeepingTracer

    async def complete(self, parent: TraceContext | None = None, **fields: object) -> str:
        """The text of a completion within the client's span."""
        headers = {} if parent is None else {"traceparent": parent.traceparent}
        body = {"model": NAME, "prompt": PROMPT, "max_tokens": 50} | fields
        status, answer = await self.cluster.post("/v1/completions", body, headers=headers)
        assert status == 200, answer
        text: str = answer["choices"][0]["text"]
        return text

    def named(self, name: str) -> list[Span]:
        return [span for span in self.tracer.spans if span.name == name]


@pytest.fixture
async def traced(redis_server: PrivateRedis, model_dir: Path) -> AsyncIterator[Traced]:
    tracer = KeepingTracer()
    async with in_own_task(open_cluster(redis_server, model_dir, TWO_OF_EACH, tracer=tracer)) as cluster:
        yield Traced(cluster, tracer)


async def test_a_completion_is_one_tree_below_the_clients_span(traced: Traced) -> None:
    assert await traced.complete(CLIENT) == TEXT
    below = f"{COMPLETION}/generate"
    assert tree(traced.tracer.spans) == {
        CLIENT.trace_id: [
            COMPLETION,
            below,
            f"{below}/call decode worker",
            f"{below}/call prefill worker",
            f"{below}/queue",
        ]
    }
    [root] = traced.named(COMPLETION)
    assert (root.parent_id, root.kind) == (CLIENT.span_id, SpanKind.SERVER)
    assert root.attributes["http.response.status_code"] == 200
    [request] = traced.named("generate")
    assert {event.name for event in request.events} == {"first_token", "first_write", "first_decode"}
    assert request.attributes["pdserve.state"] == "finished"
    assert root.start <= request.start <= request.end <= root.end + 0.01


async def test_workers_get_the_spans_of_the_calls_to_them(traced: Traced) -> None:
    await traced.complete(CLIENT)
    [to_decode], [to_prefill] = traced.named("call decode worker"), traced.named("call prefill worker")
    [start] = traced.cluster.calls.decode_starts
    assert parse_traceparent(start.traceparent) == to_decode.context
    assert traced.cluster.calls.prefill_traces == [to_prefill.context]


async def test_a_request_without_a_context_starts_a_trace_that_its_record_names(traced: Traced) -> None:
    await traced.complete()
    [(trace_id, paths)] = tree(traced.tracer.spans).items()
    assert COMPLETION in paths
    assert (await traced.cluster.only_trace())["trace_id"] == trace_id


async def test_every_endpoint_that_generates_is_traced(traced: Traced) -> None:
    chat = {"model": NAME, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 50}
    bodies = {"/v1/chat/completions": chat, "/v1/messages": chat, "/v1/responses": {"model": NAME, "input": "Hi"}}
    for path, body in bodies.items():
        status, answer = await traced.cluster.post(path, body)
        assert status == 200, answer
    roots = {span.name for span in traced.tracer.spans if span.parent_id is None}
    assert roots == {f"POST {path}" for path in bodies}


async def test_prompts_of_one_request_are_in_one_trace(traced: Traced) -> None:
    await traced.complete(prompt=["one", "two"])
    [(_, paths)] = tree(traced.tracer.spans).items()
    assert paths.count(COMPLETION) == 1
    assert paths.count(f"{COMPLETION}/generate") == 2


async def test_a_lost_worker_is_a_failed_call_followed_by_another(traced: Traced) -> None:
    traced.cluster.script.fail("prefill", vanish)
    await traced.complete(CLIENT)
    first, second = sorted(traced.named("call prefill worker"), key=lambda span: span.start)
    assert (first.error, second.error) == ("peer_lost", None)
    assert first.attributes["pdserve.worker"] != second.attributes["pdserve.worker"]
    assert [each.span_id for each in traced.cluster.calls.prefill_traces if each] == [
        first.context.span_id,
        second.context.span_id,
    ]
    [request] = traced.named("generate")
    [retry] = [event for event in request.events if event.name == "retry"]
    assert retry.attributes["pdserve.reason"] == "peer_lost"


async def test_a_request_that_fails_and_one_that_is_refused_say_so(traced: Traced) -> None:
    traced.cluster.script.fail("decode", failing(RequestError("no")))
    status, _ = await traced.cluster.complete()
    assert status == 400
    [request] = traced.named("generate")
    assert (request.error, request.attributes["pdserve.state"]) == ("RequestError", "failed")
    traced.tracer.spans.clear()
    status, _ = await traced.cluster.complete(temperature=-1)
    assert status == 400
    [refused] = traced.tracer.spans
    # The client's mistake is no failure of the server.
    assert (refused.name, refused.attributes["http.response.status_code"], refused.error) == (COMPLETION, 400, None)


async def test_no_span_has_a_word_of_prompt_or_answer(traced: Traced) -> None:
    await traced.complete(CLIENT)
    text = repr(traced.tracer.spans)
    assert "prompt that" not in text
    assert TEXT not in text


async def test_concurrent_requests_keep_their_traces(traced: Traced) -> None:
    contexts = [TraceContext(f"{number:032x}", CLIENT.span_id, True) for number in range(1, 9)]
    async with asyncio.TaskGroup() as group:
        for context in contexts:
            group.create_task(traced.complete(context))
    trees = tree(traced.tracer.spans)
    assert set(trees) == {context.trace_id for context in contexts}
    assert {len(paths) for paths in trees.values()} == {5}
    sent = [parse_traceparent(start.traceparent) for start in traced.cluster.calls.decode_starts]
    assert {context.trace_id for context in sent if context} == set(trees)


async def test_an_unsampled_request_has_no_spans_and_its_context_reaches_the_workers(traced: Traced) -> None:
    assert await traced.complete(UNSAMPLED) == TEXT
    assert traced.tracer.spans == []
    [start] = traced.cluster.calls.decode_starts
    assert parse_traceparent(start.traceparent) == UNSAMPLED


async def test_conventions_for_generative_ai_are_used_only_when_opted_in(traced: Traced) -> None:
    await traced.complete()
    assert not any(name.startswith("gen_ai.") for span in traced.tracer.spans for name in span.attributes)
    traced.tracer.spans.clear()
    traced.tracer.gen_ai = True
    await traced.complete()
    [request] = traced.named(f"text_completion {NAME}")
    record = await traced.cluster.trace(str(request.attributes["pdserve.request_id"]))
    assert request.attributes["gen_ai.usage.output_tokens"] == record["outcome"]["completion_tokens"]
    assert request.attributes["gen_ai.usage.input_tokens"] == record["prompt_tokens"]
    assert request.attributes["gen_ai.response.finish_reasons"] == ["stop"]


async def test_grpc_clients_send_their_context_as_metadata(traced: Traced) -> None:
    request = pb.GenerateRequest(model=NAME, text="x", sampling=pb.ClientSampling(max_tokens=4))
    async with traced.cluster.channel() as channel:
        call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(
            request, metadata=(("traceparent", CLIENT.traceparent),)
        )
        assert [_ async for _ in call]
    [root] = traced.named("pdserve.v1.InferenceService/Generate")
    assert (root.context.trace_id, root.parent_id) == (CLIENT.trace_id, CLIENT.span_id)
    assert len(tree(traced.tracer.spans)[CLIENT.trace_id]) == 5


async def test_without_tracing_the_clients_context_is_passed_on(cluster: ScriptedCluster) -> None:
    traced = Traced(cluster, KeepingTracer())
    assert await traced.complete(CLIENT) == TEXT
    [start] = cluster.calls.decode_starts
    assert parse_traceparent(start.traceparent) == CLIENT
    assert cluster.calls.prefill_traces == [CLIENT]
    assert (await cluster.only_trace())["trace_id"] == CLIENT.trace_id
    assert NO_TRACER.dropped == 0
