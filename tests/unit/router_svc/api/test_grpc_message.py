"""A gRPC message is measured before it is parsed."""

from __future__ import annotations

import pytest

from pdserve.base.errors import RequestError, TooLarge
from pdserve.v1 import inference_pb2 as pb
from router_svc.api.grpc_message import parse_embed, parse_request

CONTEXT = 1000


def test_a_message_within_the_limits_is_parsed() -> None:
    sampling = pb.ClientSampling(logit_bias={2**32 - 1 - key: 1.0 for key in range(300)}, stop=["x" * 256] * 4)
    by_ids = pb.TokenIds(ids=[2**32 - 1] * CONTEXT)
    for message in (
        pb.GenerateRequest(model="m", request_id="r", sampling=sampling, text="x" * 10**6),
        pb.GenerateRequest(model="m", request_id="r", sampling=sampling, token_ids=by_ids),
    ):
        assert parse_request(message.SerializeToString(), CONTEXT) == message


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * 10_000)), "bytes, but the context holds 1000 tokens"),
        (pb.GenerateRequest(sampling=pb.ClientSampling(stop_token_ids=[1] * 140_000)), "limit 131072"),
        (pb.GenerateRequest(sampling=pb.ClientSampling(logit_bias=dict.fromkeys(range(18_000), 1.0))), "limit 131072"),
    ],
    ids=["token ids", "stop token ids", "biases"],
)
def test_a_message_with_more_than_any_request_needs_is_refused(message: pb.GenerateRequest, words: str) -> None:
    with pytest.raises(TooLarge, match=words):
        parse_request(message.SerializeToString(), CONTEXT)


def test_a_message_of_many_fields_is_refused() -> None:
    with pytest.raises(TooLarge, match="more than 64 fields"):
        parse_request(b"\x12\x01a" * 100, CONTEXT)


@pytest.mark.parametrize("data", [b"\xff", b"\x12", b"\x12\x05a", b"\xff" * 20, b"\x0b", b"\x12\x01\xff"])
def test_bytes_that_are_no_message_are_the_callers_fault(data: bytes) -> None:
    with pytest.raises(RequestError, match="not a valid GenerateRequest"):
        parse_request(data, CONTEXT)


def test_a_message_with_inputs_is_measured_in_depth() -> None:
    texts = [pb.EmbedInput(text="x" * 10**5)] * 512
    message = pb.EmbedRequest(model="m", inputs=texts, dimensions=4)
    assert parse_embed(message.SerializeToString(), CONTEXT) == message
    ids = pb.EmbedInput(token_ids=pb.TokenIds(ids=[2**32 - 1] * CONTEXT))
    message = pb.EmbedRequest(inputs=[ids] * 3)
    assert parse_embed(message.SerializeToString(), CONTEXT) == message
    ids = pb.EmbedInput(token_ids=pb.TokenIds(ids=[1] * 10_000))
    with pytest.raises(TooLarge, match="bytes of token ids, but the context holds 1000 tokens"):
        parse_embed(pb.EmbedRequest(inputs=[pb.EmbedInput(text="a"), ids]).SerializeToString(), CONTEXT)
    with pytest.raises(TooLarge, match="more than 576 fields"):
        parse_embed(pb.EmbedRequest(inputs=[pb.EmbedInput()] * 577).SerializeToString(), CONTEXT)


@pytest.mark.parametrize("data", [b"\xff", b"\x12", b"\x1a\x01\xff", b"\x1a\x05a", b"\x12\x01\xff"])
def test_bytes_that_are_no_request_for_embeddings_are_the_callers_fault(data: bytes) -> None:
    with pytest.raises(RequestError, match="not a valid EmbedRequest"):
        parse_embed(data, CONTEXT)
