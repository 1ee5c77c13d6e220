"""Requests that are cancelled, or whose time is over, in every phase: work ends, and clients get an error they bear."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from pdserve.cli.private_redis import PrivateRedis
from pdserve.v1 import inference_pb2 as pb
from pdserve.v1 import inference_pb2_grpc
from router_svc.request import stream as stream_module
from tests.integration.router_svc.conftest import ScriptedCluster, open_cluster
from tests.integration.router_svc.request.support import ONE_OF_EACH
from tests.integration.router_svc.script import Context, Fault, hang, vanish
from tests.support.lazily import openai
from tests.support.redis import eventually
from tests.support.tiny_model import NAME
from tests.support.virtual_time import advance

#: Points of a request's calls, in order: reserving, queued, each chunk, before and after the commit, decoding.
POINTS = (
    "decode",
    "decode_ticket",
    "prefill",
    "prefill_queued",
    "prefill_started",
    "prefill_",
    "prefill_token",
    "prefill_commit",
    "prefill_committed",
    "decode_started",
    "decode_token",
)
ID = "my-request"
#: Time of requests whose tests let it pass. What else the clock of a test has to outlast is longer.
TIMEOUT_S = 30.0


def reaching(reached: asyncio.Event) -> Fault:
    async def reach_and_hang(context: Context) -> None:
        reached.set()
        await hang(context)

    return reach_and_hang


async def cancel(cluster: ScriptedCluster, request_id: str = ID) -> tuple[int, dict[str, Any]]:
    return await cluster.post(f"/v1/requests/{request_id}/cancel")


async def frees_everything(cluster: ScriptedCluster) -> None:
    await cluster.calls.until(lambda: cluster.calls.num_open == 0)
    assert await cluster.metric("num_requests_running") == 0
    assert await cluster.metric("num_requests_waiting") == 0


def hold_tokens(cluster: ScriptedCluster, point: str) -> None:
    """Nothing else holds a request whose prefill worker has committed."""
    cluster.script.pace = asyncio.Semaphore(0) if point == "prefill_committed" else None


async def test_a_cancelled_request_ends_in_every_phase(small_cluster: ScriptedCluster) -> None:
    for index, point in enumerate(POINTS, start=1):
        reached = asyncio.Event()
        small_cluster.script.fail(point, reaching(reached))
        hold_tokens(small_cluster, point)
        body = {"model": NAME, "prompt": f"Say {point}", "max_tokens": 50}
        headers = {"X-Request-Id": ID}
        request = asyncio.create_task(small_cluster.post("/v1/completions", json=body, headers=headers))
        await reached.wait()
        assert await cancel(small_cluster) == (200, {"id": ID, "status": "cancelled"})
        status, answer = await request
        assert (status, answer["error"]["code"], answer["error"]["type"]) == (
            499,
            "request_cancelled",
            "cancelled_error",
        )
        await frees_everything(small_cluster)
        assert (await small_cluster.trace(ID))["state"] == "cancelled"
        assert await small_cluster.metric("requests_ended_early_total", reason="cancelled") == index


async def test_a_request_whose_time_is_over_ends_in_every_phase(small_cluster: ScriptedCluster) -> None:
    for point in POINTS:
        small_cluster.script.fail(point, hang)
        hold_tokens(small_cluster, point)
        status, answer = await small_cluster.complete(prompt=f"Say {point}", timeout=0.15)
        assert (status, answer["error"]["code"], answer["error"]["type"]) == (504, "deadline_exceeded", "timeout_error")
        assert "after 0.15 s, which is its timeout" in answer["error"]["message"]
        await frees_everything(small_cluster)
        small_cluster.script.faults.clear()
    assert await small_cluster.metric("requests_ended_early_total", reason="deadline_exceeded") == len(POINTS)
    assert await small_cluster.metric("request_outcomes_total", outcome="failed") == len(POINTS)


async def test_a_request_is_cancelled_before_its_body_has_arrived(small_cluster: ScriptedCluster) -> None:
    async def body() -> AsyncIterator[bytes]:
        yield b'{"model": '
        await asyncio.Event().wait()

    headers = {"X-Request-Id": ID, "Content-Type": "application/json"}
    request = asyncio.create_task(small_cluster.post("/v1/completions", data=body(), headers=headers))
    requests = small_cluster.router._open

    async def is_open() -> bool:
        return len(requests) == 1

    await eventually(is_open)
    assert (await cancel(small_cluster))[0] == 200
    assert (await request)[0] == 499
    status, _ = await small_cluster.post(
        "/v1/completions", data=body(), headers={**headers, "X-Request-Timeout": "0.1"}
    )
    assert status == 504


@pytest.mark.advanced_time
async def test_requests_that_wait_for_a_worker_or_in_the_queue_end_at_once(small_cluster: ScriptedCluster) -> None:
    decode = small_cluster.workers["decode-0"]
    decode.registrar._heartbeat_s = 1e9
    small_cluster.script.fail("decode", vanish)
    lost = asyncio.create_task(small_cluster.post("/v1/completions", **request_with_id("lost")))
    await small_cluster.knows(1)
    queued = asyncio.create_task(small_cluster.post("/v1/completions", **request_with_id("queued")))

    async def waits() -> bool:
        return await small_cluster.metric("num_requests_waiting") == 1

    await eventually(waits)
    for name, request in (("lost", lost), ("queued", queued)):
        assert (await cancel(small_cluster, name))[0] == 200
        assert (await request)[0] == 499
    await frees_everything(small_cluster)
    late = asyncio.create_task(small_cluster.complete(timeout=TIMEOUT_S))
    await eventually(waits)
    advance(TIMEOUT_S)
    status, answer = await late
    assert status == 504
    assert "it was queued" in answer["error"]["message"]


def request_with_id(request_id: str) -> dict[str, Any]:
    body = {"model": NAME, "prompt": "Say hello", "max_tokens": 50}
    return {"json": body, "headers": {"X-Request-Id": request_id}}


@pytest.mark.advanced_time
async def test_a_stream_that_is_ended_has_an_error_as_its_last_event(small_cluster: ScriptedCluster) -> None:
    for end, code in ((cancel, "request_cancelled"), (let_time_pass, "deadline_exceeded")):
        small_cluster.script.pace = asyncio.Semaphore(2)
        timeout = {} if end is cancel else {"timeout": TIMEOUT_S}
        request = request_with_id(ID)
        request["json"] |= {"stream": True, **timeout}
        async with small_cluster.http.post(f"{small_cluster.base_url}/v1/completions", **request) as response:
            assert response.headers["X-Request-Id"] == ID
            lines = [await response.content.readline()]
            await end(small_cluster)
            lines += [line async for line in response.content if line.strip()]
        assert lines[-1] == b"data: [DONE]\n"
        assert json.loads(lines[-2].removeprefix(b"data: "))["error"]["code"] == code
        await frees_everything(small_cluster)


async def let_time_pass(_: ScriptedCluster) -> tuple[int, dict[str, Any]]:
    advance(TIMEOUT_S)
    return 0, {}


@pytest.mark.advanced_time
async def test_openais_client_raises_and_does_not_try_again(small_cluster: ScriptedCluster) -> None:
    """Its retries are on. Fails if the answer is one that it repeats."""
    async with small_cluster.client() as plain:
        client = plain.with_options(max_retries=5)
        reached = asyncio.Event()
        small_cluster.script.fail("decode", reaching(reached))
        request = asyncio.create_task(
            client.completions.create(model=NAME, prompt="x", extra_body={"timeout": TIMEOUT_S})
        )
        await reached.wait()
        advance(TIMEOUT_S)
        with pytest.raises(openai.APIStatusError) as late:
            await request
        assert late.value.status_code == 504
        small_cluster.script.pace = asyncio.Semaphore(1)
        stream = await client.completions.create(
            model=NAME, prompt="x", stream=True, extra_headers={"X-Request-Id": ID}
        )
        with pytest.raises(openai.APIError, match="was cancelled"):
            async for _ in stream:
                await cancel(small_cluster)
        assert len(small_cluster.calls.decode_starts) == 2


async def test_a_request_that_has_ended_or_never_was_is_not_cancelled(small_cluster: ScriptedCluster) -> None:
    _, answer = await small_cluster.complete()
    assert await cancel(small_cluster, answer["id"]) == (200, {"id": answer["id"], "status": "finished"})
    status, refusal = await cancel(small_cluster, "cmpl-unknown")
    assert (status, refusal["error"]["type"]) == (404, "not_found_error")
    assert (await cancel(small_cluster, "not%20an%20id"))[0] == 400
    # A web page of another origin sends its origin, and no type that it would have to ask for.
    status, _ = await small_cluster.post(
        "/v1/requests/x/cancel", data="{}", headers={"Origin": "http://evil.example", "Content-Type": "text/plain"}
    )
    assert status == 415


async def test_timeouts_are_checked(small_cluster: ScriptedCluster) -> None:
    for timeout in (0, -1, 1e9, "5", True):
        status, answer = await small_cluster.complete(timeout=timeout)
        assert (status, answer["error"]["param"]) == (400, "timeout"), timeout
    status, _ = await small_cluster.post("/v1/completions", **request_with_timeout("soon"))
    assert status == 400
    status, _ = await small_cluster.post("/v1/completions", **request_with_timeout("30.5"))
    assert status == 200


def request_with_timeout(text: str) -> dict[str, Any]:
    request = request_with_id(ID)
    return {**request, "headers": {"X-Request-Timeout": text}}


async def test_requests_without_a_timeout_have_that_of_the_router(redis_server: PrivateRedis, model_dir: Path) -> None:
    async with open_cluster(redis_server, model_dir, ONE_OF_EACH, request_timeout_s=0.1) as cluster:
        status, _ = await cluster.complete(timeout=60)
        assert status == 200
        cluster.script.fail("decode", hang)
        status, answer = await cluster.complete()
        assert (status, answer["error"]["code"]) == (504, "deadline_exceeded")


async def test_grpc_calls_end_at_their_deadline_and_by_cancel(small_cluster: ScriptedCluster) -> None:
    async with small_cluster.channel() as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        request = pb.GenerateRequest(model=NAME, text="Say hello", request_id=ID)

        async def code_of(ended: Callable[[], Awaitable[object]], timeout_s: float | None) -> grpc.StatusCode:
            """The code of a call that ends while it waits for its ticket. A deadline that comes sooner is doubled."""
            while True:
                reached = asyncio.Event()
                small_cluster.script.fail("decode_ticket", reaching(reached))
                call = stub.Generate(request, timeout=timeout_s)
                code = asyncio.ensure_future(call.code())
                reaches = asyncio.ensure_future(reached.wait())
                await asyncio.wait((code, reaches), return_when=asyncio.FIRST_COMPLETED)
                if not reached.is_set() and timeout_s is not None:
                    reaches.cancel()
                    small_cluster.script.faults.clear()
                    timeout_s *= 2
                    continue
                await ended()
                status: grpc.StatusCode = await code
                await frees_everything(small_cluster)
                return status

        async def cancelled() -> None:
            answer = await stub.Cancel(pb.CancelRequest(request_id=ID))
            assert answer.status == "cancelled"

        async def waited() -> None:
            pass

        assert await code_of(cancelled, None) is grpc.StatusCode.CANCELLED
        assert await code_of(waited, 0.3) is grpc.StatusCode.DEADLINE_EXCEEDED
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await stub.Cancel(pb.CancelRequest(request_id="gen-unknown"))
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND


async def test_comments_keep_the_stream_of_an_admitted_request_open_before_its_first_token(
    small_cluster: ScriptedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_module, "KEEP_ALIVE_S", 0.02)
    goes_on = asyncio.Event()

    async def wait(_: Context) -> None:
        await goes_on.wait()

    small_cluster.script.fail("decode_ticket", wait)
    body = {"model": NAME, "prompt": "Say hello", "max_tokens": 50, "stream": True}
    async with small_cluster.http.post(f"{small_cluster.base_url}/v1/completions", json=body) as response:
        assert response.status == 200
        assert (await response.content.readline()).startswith(b": ")
        goes_on.set()
        lines = [line async for line in response.content if line.startswith(b"data: ")]
    assert lines[-1] == b"data: [DONE]\n"
    text = "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines[:-1])
    assert text == "Hello world."
