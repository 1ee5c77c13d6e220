from __future__ import annotations

import asyncio
from typing import Any

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


async def test_the_first_message_has_the_log_probabilities_of_the_prompt(cluster: ScriptedCluster) -> None:
    sampling = pb.ClientSampling(max_tokens=4, n=2, prompt_logprobs=2)
    request = pb.GenerateRequest(model=NAME, text="Say", sampling=sampling, return_token_ids=True)
    async with cluster.channel() as channel:
        first, *others = [each async for each in inference_pb2_grpc.InferenceServiceStub(channel).Generate(request)]
    assert [entry.logprob for entry in first.prompt_logprobs] == [-97.0, -121.0]
    assert [list(entry.top_ids) for entry in first.prompt_logprobs] == [[65, 66]] * 2
    assert list(first.prompt_token_ids) == tokens_of("Say")
    assert not any(each.prompt_logprobs or each.prompt_token_ids for each in others)
    assert sum(len(choice.token_ids) for each in others for choice in each.choices) == 8


async def test_absent_fields_take_the_apis_defaults_and_given_ones_count(cluster: ScriptedCluster) -> None:
    async with cluster.channel() as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        ids = pb.TokenIds(ids=tokens_of("x"))
        sampling = pb.ClientSampling(temperature=0.0, logit_bias={65: 1.5}, seed=7, logprobs=0)
        sampling.allowed_token_ids.extend(range(256))
        sampling.logprob_token_ids.extend((9, 8))
        sampling.bad_words.append("ab")
        [_ async for _ in stub.Generate(pb.GenerateRequest(model=NAME, token_ids=ids, sampling=sampling))]
    sent = cluster.calls.decode_starts[0].sampling
    assert (sent.max_tokens, sent.temperature, sent.top_p, sent.seed) == (16, 0.0, 1.0, 7)
    assert dict(sent.logit_bias) == {65: 1.5}
    assert [*sent.allowed_token_ids] == [*range(256)]
    assert [*sent.logprob_token_ids] == [9, 8]
    assert [[*word.token_ids] for word in sent.bad_words] == [tokens_of("ab"), tokens_of(" ab")]


@pytest.mark.parametrize(
    ("request_", "code", "words"),
    [
        (pb.GenerateRequest(model="other", text="x"), "NOT_FOUND", "does not exist"),
        (pb.GenerateRequest(model=NAME), "INVALID_ARGUMENT", "empty"),
        (pb.GenerateRequest(model=NAME, text="x" * 300), "INVALID_ARGUMENT", "300 tokens"),
        (pb.GenerateRequest(model=NAME, token_ids=pb.TokenIds(ids=[9999])), "INVALID_ARGUMENT", "vocabulary"),
        (pb.GenerateRequest(model=NAME, text="x", request_id="a b"), "INVALID_ARGUMENT", "request_id"),
        (pb.GenerateRequest(model=NAME, text="x", truncate_prompt_tokens=0), "INVALID_ARGUMENT", "at least 1"),
        (
            pb.GenerateRequest(model=NAME, text="x", sampling=pb.ClientSampling(logprob_token_ids=[1])),
            "INVALID_ARGUMENT",
            "needs `logprobs`",
        ),
        (
            pb.GenerateRequest(model=NAME, text="x", sampling=pb.ClientSampling(temperature=float("nan"))),
            "INVALID_ARGUMENT",
            "finite",
        ),
        (pb.GenerateRequest(model=NAME, text="x", sampling=pb.ClientSampling(n=1000)), "INVALID_ARGUMENT", "128"),
        (pb.GenerateRequest(model=NAME, text="x", sampling=pb.ClientSampling(logprobs=21)), "INVALID_ARGUMENT", "20"),
        (
            pb.GenerateRequest(model=NAME, text="x", sampling=pb.ClientSampling(prompt_logprobs=2**31)),
            "INVALID_ARGUMENT",
            "`prompt_logprobs`",
        ),
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


def _inputs(*given: str | list[int]) -> list[pb.EmbedInput]:
    return [
        pb.EmbedInput(text=each) if isinstance(each, str) else pb.EmbedInput(token_ids=pb.TokenIds(ids=each))
        for each in given
    ]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"dimensions": 5, "pooling": "mean", "cache_salt": "s"},
        {"normalize": False, "pooling": "cls", "truncate_prompt_tokens": 3, "add_special_tokens": False},
    ],
)
async def test_embeddings_are_those_of_the_http_api(small_cluster: ScriptedCluster, fields: dict[str, Any]) -> None:
    texts = ["Say hello", "abc", "xyz"]
    for given in (texts, [tokens_of(text) for text in texts]):
        request = pb.EmbedRequest(
            model=NAME, inputs=_inputs(*given), request_id="mine", return_token_ids=True, **fields
        )
        small_cluster.calls.prefills.clear()
        async with small_cluster.channel() as channel:
            answer = await inference_pb2_grpc.InferenceServiceStub(channel).Embed(request)
        sent = {bytes(each.prompt_token_ids): (each.pooling, each.cache_salt) for each in small_cluster.calls.prefills}
        assert len(sent) == 3
        small_cluster.calls.prefills.clear()
        same = await small_cluster.post(
            "/v1/embeddings", {"model": NAME, "input": given, "return_token_ids": True, **fields}
        )
        assert [list(each.values) for each in answer.embeddings] == [each["embedding"] for each in same[1]["data"]]
        assert [list(each.prompt_token_ids) for each in answer.embeddings] == [
            each["prompt_token_ids"] for each in same[1]["data"]
        ]
        assert answer.usage.prompt_tokens == same[1]["usage"]["prompt_tokens"]
        assert sent == {
            bytes(each.prompt_token_ids): (each.pooling, each.cache_salt) for each in small_cluster.calls.prefills
        }
        record = await small_cluster.trace(answer.request_id)
        assert record["endpoint"] == "pdserve.v1.InferenceService/Embed"


@pytest.mark.parametrize(
    ("fields", "code", "param", "words"),
    [
        ({"model": "other"}, "NOT_FOUND", "model", "does not exist"),
        ({"inputs": []}, "INVALID_ARGUMENT", "inputs", "`inputs` has 0 inputs"),
        (
            {"inputs": [pb.EmbedInput(text="a"), pb.EmbedInput()]},
            "INVALID_ARGUMENT",
            "inputs[1]",
            "`inputs[1]` is empty",
        ),
        ({"inputs": _inputs("a", [1])}, "INVALID_ARGUMENT", "inputs", "Send one kind"),
        ({"inputs": _inputs("x" * 300)}, "INVALID_ARGUMENT", "inputs", "300 tokens"),
        ({"inputs": _inputs([9999])}, "INVALID_ARGUMENT", "inputs", "vocabulary"),
        ({"inputs": _inputs(*["a"] * 513)}, "INVALID_ARGUMENT", "inputs", "512"),
        ({"inputs": _inputs([1] * 9999)}, "INVALID_ARGUMENT", "inputs", "bytes of token ids"),
        ({"dimensions": 17}, "INVALID_ARGUMENT", "dimensions", "have 16"),
        ({"dimensions": 0}, "INVALID_ARGUMENT", "dimensions", "dimensions"),
        ({"pooling": "max"}, "INVALID_ARGUMENT", "pooling", "pooling"),
        ({"prompt_name": "query"}, "INVALID_ARGUMENT", "prompt_name", "the model's prompts are"),
        ({"truncate_prompt_tokens": 0}, "INVALID_ARGUMENT", "truncate_prompt_tokens", "at least 1"),
        ({"priority": 2}, "INVALID_ARGUMENT", "priority", "--scheduling-policy"),
        ({"cache_salt": "a/b"}, "INVALID_ARGUMENT", "cache_salt", "cache_salt"),
        ({"request_id": "a b"}, "INVALID_ARGUMENT", "request_id", "request_id"),
    ],
)
async def test_embeddings_that_cannot_be_made_are_refused_by_the_fields_name(
    small_cluster: ScriptedCluster, fields: dict[str, Any], code: str, param: str, words: str
) -> None:
    request = pb.EmbedRequest(**({"model": NAME, "inputs": _inputs("a")} | fields))
    async with small_cluster.channel() as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await inference_pb2_grpc.InferenceServiceStub(channel).Embed(request)
    assert refusal.value.code().name == code
    assert words in (refusal.value.details() or "")
    assert dict(refusal.value.trailing_metadata() or ())["pdserve-param"] == param
    assert not small_cluster.calls.prefills


async def test_embeddings_of_a_client_that_cancels_end(small_cluster: ScriptedCluster) -> None:
    small_cluster.script.fail("prefill", lambda _: asyncio.Event().wait())  # type: ignore[arg-type, return-value]
    async with small_cluster.channel() as channel:
        call = inference_pb2_grpc.InferenceServiceStub(channel).Embed(pb.EmbedRequest(model=NAME, inputs=_inputs("a")))
        await small_cluster.calls.until(lambda: bool(small_cluster.calls.prefills))
        call.cancel()
        await small_cluster.calls.until(lambda: small_cluster.calls.num_open == 0)
    assert (await small_cluster.only_trace())["state"] == "cancelled"
