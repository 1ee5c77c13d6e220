"""The gRPC API for clients, with health and reflection, against a real cluster."""

from __future__ import annotations

import re

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from pdserve.v1 import inference_pb2 as pb
from pdserve.v1 import inference_pb2_grpc as pb_grpc
from tests.support.cluster import MODEL, Cluster


def _request(**fields: object) -> pb.GenerateRequest:
    sampling = pb.ClientSampling(temperature=0, max_tokens=12, ignore_eos=True)
    return pb.GenerateRequest(**({"model": MODEL, "text": "Once upon a time", "sampling": sampling} | fields))  # type: ignore[arg-type]


def test_tokens_are_streamed_and_the_last_message_has_the_usage(cluster: Cluster) -> None:
    with grpc.insecure_channel(cluster.grpc_address) as channel:
        messages = list(pb_grpc.InferenceServiceStub(channel).Generate(_request(), timeout=60))
    assert len(messages) > 3
    ids = [token for message in messages for choice in message.choices for token in choice.token_ids]
    assert len(ids) == 12
    assert messages[-1].usage.completion_tokens == 12
    with cluster.client() as client:
        same = client.completions.create(
            model=MODEL, prompt="Once upon a time", max_tokens=12, temperature=0, extra_body={"ignore_eos": True}
        )
    assert "".join(choice.text for message in messages for choice in message.choices) == same.choices[0].text


@pytest.mark.parametrize(
    ("structure", "pattern"),
    [
        (pb.StructuredOutput(regex="[a-f]{5}"), "[a-f]{5}"),
        (pb.StructuredOutput(choice=pb.Texts(texts=["one", "two"])), "one|two"),
        (pb.StructuredOutput(json_schema='{"enum": [1, "b"]}', disable_any_whitespace=True), '1|"b"'),
    ],
)
def test_outputs_have_the_structure_that_was_requested(
    cluster: Cluster, structure: pb.StructuredOutput, pattern: str
) -> None:
    with grpc.insecure_channel(cluster.grpc_address) as channel:
        request = _request(structured_output=structure)
        messages = list(pb_grpc.InferenceServiceStub(channel).Generate(request, timeout=60))
    assert re.fullmatch(pattern, "".join(choice.text for message in messages for choice in message.choices))


def test_embeddings_are_those_of_the_http_api(cluster: Cluster) -> None:
    texts = ["Once upon a time", "The sea is cold in winter."]
    request = pb.EmbedRequest(
        model=MODEL, inputs=[pb.EmbedInput(text=text) for text in texts], dimensions=64, pooling="mean"
    )
    with grpc.insecure_channel(cluster.grpc_address) as channel:
        answer = pb_grpc.InferenceServiceStub(channel).Embed(request, timeout=60)
    with cluster.client() as client:
        same = client.embeddings.create(
            model=MODEL, input=texts, dimensions=64, extra_body={"pooling": "mean"}, encoding_format="float"
        )
    assert [list(each.values) for each in answer.embeddings] == [each.embedding for each in same.data]
    assert answer.usage.prompt_tokens == same.usage.prompt_tokens


@pytest.mark.parametrize(
    ("fields", "code", "needle"),
    [
        ({"model": "gpt-17"}, grpc.StatusCode.NOT_FOUND, "gpt-17"),
        ({"text": ""}, grpc.StatusCode.INVALID_ARGUMENT, "prompt"),
        ({"structured_output": pb.StructuredOutput()}, grpc.StatusCode.INVALID_ARGUMENT, "structured_output"),
        (
            {"structured_output": pb.StructuredOutput(json_schema='{"items": {"not": {}}}')},
            grpc.StatusCode.INVALID_ARGUMENT,
            "structured_outputs.json.items",
        ),
        ({"sampling": pb.ClientSampling(n=1000)}, grpc.StatusCode.INVALID_ARGUMENT, "128"),
        ({"sampling": pb.ClientSampling(temperature=float("nan"))}, grpc.StatusCode.INVALID_ARGUMENT, "temperature"),
    ],
)
def test_bad_input_is_refused_with_its_reason(
    cluster: Cluster, fields: dict[str, object], code: grpc.StatusCode, needle: str
) -> None:
    with grpc.insecure_channel(cluster.grpc_address) as channel, pytest.raises(grpc.RpcError) as caught:
        list(pb_grpc.InferenceServiceStub(channel).Generate(_request(**fields), timeout=60))
    assert caught.value.code() is code  # type: ignore[attr-defined]
    assert needle in caught.value.details()  # type: ignore[attr-defined]


def test_health_and_reflection_answer(cluster: Cluster) -> None:
    with grpc.insecure_channel(cluster.grpc_address) as channel:
        health = health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(service="pdserve.v1.InferenceService"), timeout=10
        )
        services = set(ProtoReflectionDescriptorDatabase(channel).get_services())
    assert health.status == health_pb2.HealthCheckResponse.SERVING
    assert {"pdserve.v1.InferenceService", "grpc.health.v1.Health"} <= services


def test_a_call_that_the_client_cancels_stops_and_frees_everything(cluster: Cluster) -> None:
    generated = cluster.worker_metric("decode", "pdserve_generation_tokens_total")
    max_tokens = 4000
    sampling = pb.ClientSampling(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    with grpc.insecure_channel(cluster.grpc_address) as channel:
        call = pb_grpc.InferenceServiceStub(channel).Generate(_request(sampling=sampling), timeout=60)
        for _ in range(5):
            next(call)
        call.cancel()
        cluster.wait_idle()
    assert cluster.worker_metric("decode", "pdserve_generation_tokens_total") < generated + max_tokens
