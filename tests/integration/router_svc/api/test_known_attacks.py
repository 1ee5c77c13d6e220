"""What broke other servers, sent to this one over its ports."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve.v1 import inference_pb2 as pb
from pdserve.v1 import inference_pb2_grpc
from tests.integration.router_svc.api.test_keys import routes_of
from tests.integration.router_svc.conftest import ScriptedCluster
from tests.support.tiny_model import NAME, VOCAB_SIZE

OUTSIDE = (-1, VOCAB_SIZE, 2**31, 2**32, 2**63, 2**64)


async def test_token_ids_outside_of_the_vocabulary_reach_no_worker(small_cluster: ScriptedCluster) -> None:
    """They crashed workers, or changed rows of others (vllm#44968, #54195, #16529; gonka#1170).

    Fails without `check_token_ids`.
    """
    for token_id in OUTSIDE:
        for fields in (
            {"stop_token_ids": [1, token_id]},
            {"allowed_token_ids": [1, token_id]},
            {"logprob_token_ids": [1, token_id], "logprobs": 0},
            {"logit_bias": {"1": 1, str(token_id): 1}},
            {"prompt": [1, token_id]},
        ):
            status, body = await small_cluster.complete(**fields)
            assert status == 400, fields
            assert body["error"]["param"].partition("[")[0] in fields, body
        status, _ = await small_cluster.post("/detokenize", {"tokens": [1, token_id]})
        assert status == 400
    async with small_cluster.channel() as channel:
        generate = inference_pb2_grpc.InferenceServiceStub(channel).Generate
        for token_id in (VOCAB_SIZE, 2**31, 2**32 - 1):
            for request in (
                pb.GenerateRequest(model=NAME, text="x", sampling=pb.ClientSampling(stop_token_ids=[token_id])),
                pb.GenerateRequest(model=NAME, text="x", sampling=pb.ClientSampling(allowed_token_ids=[1, token_id])),
                pb.GenerateRequest(model=NAME, text="x", sampling=pb.ClientSampling(logit_bias={token_id: 1.0})),
                pb.GenerateRequest(model=NAME, token_ids=pb.TokenIds(ids=[1, token_id])),
            ):
                with pytest.raises(grpc.aio.AioRpcError, match="vocabulary") as refused:
                    [_ async for _ in generate(request)]
                assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert small_cluster.calls.decode_starts == []


HUGE = {
    "one header of a megabyte": b"GET /livez HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 2**20 + b"\r\n\r\n",
    "100,000 headers": b"GET /livez HTTP/1.1\r\nHost: localhost\r\n" + b"X: a\r\n" * 100_000 + b"\r\n",
    "100,000 headers without an end": b"GET /livez HTTP/1.1\r\nHost: localhost\r\n" + b"X: a\r\n" * 100_000,
    "a target of a megabyte": b"GET /" + b"a" * 2**20 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "trailers": b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n0\r\n" + b"X: a\r\n" * 100_000,
}


async def test_huge_headers_are_refused_as_they_arrive(small_cluster: ScriptedCluster) -> None:
    """CVE-2025-48956: a header of any size was kept in memory. Fails with a larger `max_field_size` of aiohttp."""
    host, port = small_cluster.base_url.removeprefix("http://").split(":")
    for name, data in HUGE.items():
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(data)
        # The end is there before all of it is written: the server reads no further.
        answer = await asyncio.wait_for(reader.readline(), 10)
        assert answer.split()[1] == b"431", name
        writer.transport.abort()
    async with small_cluster.channel() as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await check(health_pb2.HealthCheckRequest(), metadata=(("x", "a" * 2**20),))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (await small_cluster.complete())[0] == 200


async def test_no_path_takes_a_file_a_model_or_an_order_to_the_engine(small_cluster: ScriptedCluster) -> None:
    """CVE-2026-7482, CVE-2026-42248, CVE-2025-10164 and CVE-2026-9540 came in by such paths. Fails with any new one:
    judge what it takes, and from whom, before it is added here.
    """
    changing = {path for method, path in routes_of(small_cluster) if method not in ("GET", "HEAD")}
    # These take an id and nothing else, and end or delete what is the caller's own tenant's alone.
    own = {"/v1/requests/x/cancel", "/v1/responses/x", "/v1/responses/x/cancel"}
    generating = {"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"}
    generating |= {"/api/chat", "/api/generate"}
    reading = {"/tokenize", "/detokenize", "/v1/messages/count_tokens", "/api/show"}
    # These take texts, token ids and how to pool them. A prompt's name is looked up among those of the model's files.
    pooled = {"/v1/embeddings", "/v1/score", "/v1/rerank", "/api/embed", "/api/embeddings"}
    # It takes texts, and the names of possible answers, which are texts of the prompt as well.
    deciding = {"/v1/decisions"}
    # Only with a store. An upload is data of its tenant: sealed, bounded, refused from web pages, and names no path
    # or code. A batch names such a file, and its lines are requests of the same tenant.
    stored = {"/v1/files", "/v1/files/x", "/v1/batches", "/v1/batches/x/cancel"}
    assert changing == generating | reading | own | pooled | deciding | stored
    for path in (
        "/api/create",
        "/api/push",
        "/api/pull",
        "/api/copy",
        "/api/blobs/sha256:00",
        "/v1/files",
        "/update_weights",
        "/load_lora_adapter",
        "/pause",
        "/shutdown",
    ):
        assert (await small_cluster.post(path, {}))[0] == 404


async def test_no_path_leads_to_a_file(small_cluster: ScriptedCluster) -> None:
    """CVE-2026-7302. Fails when the console's files are served from a directory by their name."""
    host, port = small_cluster.base_url.removeprefix("http://").split(":")
    for name in ("../../etc/passwd", "..%2f..%2fetc%2fpasswd", "/etc/passwd", "%2fetc%2fpasswd", "console.css%00.js"):
        for path in (f"/console/{name}", f"/v1/models/{name}", f"/v1/requests/{name}/trace"):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
            answer = await reader.read()
            writer.close()
            assert answer.split()[1] in (b"400", b"404"), path
            assert b"root:" not in answer
