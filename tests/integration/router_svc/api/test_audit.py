"""Refusals in the audit log, over HTTP and gRPC."""

from __future__ import annotations

import io
import logging
from typing import Any

import grpc
import pytest

from pdserve.v1 import inference_pb2 as pb
from pdserve.v1 import inference_pb2_grpc
from tests.integration.router_svc.conftest import ScriptedCluster
from tests.support.tiny_model import NAME

SECRET = "what only the client and the model may know"


@pytest.fixture
def written(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level("INFO", logger="audit")
    return caplog


def refusals(written: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [vars(record)["fields"] for record in written.records if record.name == "audit"]


async def test_refusals_over_http_name_reason_client_model_and_request(
    small_cluster: ScriptedCluster, written: pytest.LogCaptureFixture
) -> None:
    body = {"model": NAME, "prompt": SECRET, "temperature": -1}
    headers = {"X-Request-Id": "mine", "X-Forwarded-For": "192.0.2.1"}
    assert (await small_cluster.post("/v1/completions", body, headers=headers))[0] == 400
    body = {"model": "other", "prompt": SECRET}
    assert (await small_cluster.post("/v1/completions", body))[0] == 404
    assert (await small_cluster.post("/v1/completions", data=io.BytesIO(bytes(9 << 20))))[0] == 413
    assert (await small_cluster.post("/nowhere", {}))[0] == 404
    assert (await small_cluster.complete())[0] == 200
    found = refusals(written)
    assert [(each["reason"], each["status"], each["endpoint"], each["model"]) for each in found] == [
        ("request_error", 400, "POST /v1/completions", ""),
        ("not_found", 404, "POST /v1/completions", "other"),
        ("payload_too_large", 413, "POST /v1/completions", ""),
        ("not_found", 404, "POST /nowhere", ""),
    ]
    assert (found[0]["client"], found[0]["request_id"], found[0]["forwarded_for"]) == ("127.0.0.1", "mine", "192.0.2.1")
    assert SECRET not in str([vars(record) for record in written.records])


async def test_refusals_over_grpc_are_written_alike(
    small_cluster: ScriptedCluster, written: pytest.LogCaptureFixture
) -> None:
    async with small_cluster.channel() as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError):
            [_ async for _ in stub.Generate(pb.GenerateRequest(model="other", text=SECRET, request_id="mine"))]
    [found] = refusals(written)
    assert found == {
        "reason": "not_found",
        "status": 404,
        "client": "127.0.0.1",
        "endpoint": "pdserve.v1.InferenceService/Generate",
        "model": "other",
        "request_id": "mine",
    }


async def test_a_router_that_drains_refuses_with_a_reason(
    small_cluster: ScriptedCluster, written: pytest.LogCaptureFixture
) -> None:
    await small_cluster.router.drain()
    assert (await small_cluster.complete())[0] == 503
    [found] = refusals(written)
    assert (found["reason"], found["status"], found["model"]) == ("draining", 503, NAME)
    assert logging.getLogger("audit").propagate
