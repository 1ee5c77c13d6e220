from __future__ import annotations

import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve.v1 import inference_pb2 as pb
from pdserve.v1 import inference_pb2_grpc
from router_svc.api.grpc_api import SERVICE
from tests.integration.router_svc.conftest import ScriptedCluster
from tests.support.tiny_model import NAME, tokens_of


async def test_a_completion_streams_and_ends_with_its_usage(cluster: ScriptedCluster) -> None:
    cluster.script.cached_tokens = 3
    request = pb.GenerateRequest(
        model=NAME, text="Say hello", sampling=pb.ClientSampling(max_tokens=50, logprobs=1, stop=["world"])
    )
    async with cluster.channel() as channel:
        responses = [message async for message in inference_pb2_grpc.InferenceServiceStub(channel).Generate(request)]
    choices = [choice for response in responses for choice in response.choices]
    assert "".join(choice.text for choice in choices) == "Hello "
    assert [choice.finish_reason for choice in choices][-1] == "stop"
    assert sum(len(choice.logprobs) for choice in choices) == 11
    assert responses[-1].usage == pb.Usage(prompt_tokens=9, completion_tokens=11, cached_tokens=3)
    assert len({response.request_id for response in responses}) == 1
    record = await cluster.trace(responses[0].request_id)
    assert record["endpoint"] == "grpc"


async def test_absent_fields_take_the_apis_defaults_and_given_ones_count(cluster: ScriptedCluster) -> None:
    async with cluster.channel() as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        ids = pb.TokenIds(ids=tokens_of("x"))
        sampling = pb.ClientSampling(temperature=0.0, logit_bias={65: 1.5}, seed=7)
        [_ async for _ in stub.Generate(pb.GenerateRequest(model=NAME, token_ids=ids, sampling=sampling))]
    sent = cluster.calls.decode_starts[0].sampling
    assert (sent.max_tokens, sent.temperature, sent.top_p, sent.seed) == (16, 0.0, 1.0, 7)
    assert dict(sent.logit_bias) == {65: 1.5}


@pytest.mark.parametrize(
    ("request_", "code", "words"),
    [
        (pb.GenerateRequest(model="other", text="x"), "NOT_FOUND", "does not exist"),
        (pb.GenerateRequest(model=NAME), "INVALID_ARGUMENT", "empty"),
        (pb.GenerateRequest(model=NAME, text="x" * 300), "INVALID_ARGUMENT", "300 tokens"),
        (pb.GenerateRequest(model=NAME, token_ids=pb.TokenIds(ids=[9999])), "INVALID_ARGUMENT", "vocabulary"),
        (pb.GenerateRequest(model=NAME, text="x", request_id="a b"), "INVALID_ARGUMENT", "request_id"),
        (
            pb.GenerateRequest(model=NAME, text="x", sampling=pb.ClientSampling(temperature=float("nan"))),
            "INVALID_ARGUMENT",
            "finite",
        ),
        (pb.GenerateRequest(model=NAME, text="x", sampling=pb.ClientSampling(n=1000)), "INVALID_ARGUMENT", "128"),
        (pb.GenerateRequest(model=NAME, text="x", sampling=pb.ClientSampling(logprobs=21)), "INVALID_ARGUMENT", "20"),
    ],
)
async def test_bad_input_is_refused_with_its_reason(
    small_cluster: ScriptedCluster, request_: pb.GenerateRequest, code: str, words: str
) -> None:
    async with small_cluster.channel() as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            [_ async for _ in inference_pb2_grpc.InferenceServiceStub(channel).Generate(request_)]
    assert refusal.value.code().name == code
    assert words in (refusal.value.details() or "")


async def test_a_client_that_cancels_ends_the_work(small_cluster: ScriptedCluster) -> None:
    small_cluster.script.pace = asyncio.Semaphore(1)
    async with small_cluster.channel() as channel:
        call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(pb.GenerateRequest(model=NAME, text="x"))
        await anext(aiter(call))
        call.cancel()
        await small_cluster.calls.until(lambda: small_cluster.calls.num_open == 0)
    assert (await small_cluster.only_trace())["state"] == "cancelled"


async def test_health_follows_the_decode_workers(small_cluster: ScriptedCluster) -> None:
    async with small_cluster.channel() as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        statuses = aiter(watch)
        assert (await anext(statuses)).status == health_pb2.HealthCheckResponse.SERVING
        small_cluster.workers["decode-0"].set(ready=False)
        assert (await anext(statuses)).status == health_pb2.HealthCheckResponse.NOT_SERVING
        watch.cancel()
