"""What a gRPC client may send at a time, and how long it may leave an answer unread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import grpc
import pytest

from pdserve.base.errors import RequestError, TransferTimeout
from pdserve.base.rpc import GrpcPort, open_channel
from pdserve.base.sampling import MAX_LOGIT_BIAS
from pdserve.v1 import inference_pb2 as pb
from router_svc.api import grpc_api
from router_svc.api.grpc_api import public_port
from router_svc.config import RouterConfig
from router_svc.request.stream import TokenUsage

METHOD = f"/{grpc_api.SERVICE}/Generate"
DEADLINE_S = 20.0
Handler = Callable[[bytes, Any], Awaitable[bytes]]


@asynccontextmanager
async def served(port: GrpcPort, handler: Handler) -> AsyncIterator[str]:
    """The address of a server at this port, which answers every call by `handler`."""
    server = port.server()
    generate: Any = grpc.unary_unary_rpc_method_handler(cast(Any, handler))
    server.add_registered_method_handlers(grpc_api.SERVICE, {"Generate": generate})
    address = port.bind(server)
    await server.start()
    try:
        yield address
    finally:
        await server.stop(0)


@pytest.fixture
def config(model_dir: Path) -> RouterConfig:
    return RouterConfig(model=str(model_dir), redis_url="", port=0, max_body=100_000, max_num_queued_reqs=1)


async def test_a_message_larger_than_a_body_may_be_reaches_no_handler(config: RouterConfig) -> None:
    """Finding 8: the limit was 64 MiB. Fails without `max_request_bytes` in `public_port`."""
    arrived: list[int] = []

    async def handler(data: bytes, _: object) -> bytes:
        arrived.append(len(data))
        return b""

    async with served(public_port(config, None), handler) as address, open_channel(address) as channel:
        call = channel.unary_unary(METHOD)
        await call(b"x" * 100_000, timeout=DEADLINE_S)
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await call(b"x" * 100_001, timeout=DEADLINE_S)
    assert refusal.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert arrived == [100_000]


@pytest.mark.parametrize("per_connection", [1, 3])
async def test_calls_at_a_time_are_bounded_for_all_clients_and_for_each(
    config: RouterConfig, per_connection: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finding 8. The queue has one place here, and two more calls are allowed.

    Fails without `max_calls` and without `max_calls_per_connection` in `public_port`.
    """
    monkeypatch.setattr(grpc_api, "_CALLS_BEYOND_QUEUE", 1)
    monkeypatch.setattr(grpc_api, "_CALLS_PER_CONNECTION", per_connection)
    running, may_end, has_more = 0, asyncio.Event(), asyncio.Condition()

    async def handler(data: bytes, _: object) -> bytes:
        nonlocal running
        async with has_more:
            running += 1
            has_more.notify_all()
        await may_end.wait()
        return data

    async with (
        served(public_port(config, None), handler) as address,
        asyncio.timeout(DEADLINE_S),
        open_channel(address) as one,
        open_channel(address) as other,
    ):
        calls = [one.unary_unary(METHOD)(b"") for _ in range(3)]
        ended = [asyncio.ensure_future(call.code()) for call in calls]
        if per_connection == 1:
            # The others wait in the client, so another one gets the second place.
            calls.append(other.unary_unary(METHOD)(b""))
            async with has_more:
                await has_more.wait_for(lambda: running == 2)
            assert not any(code.done() for code in ended)
        else:
            [refused], _ = await asyncio.wait(ended, return_when=asyncio.FIRST_COMPLETED)
            assert refused.result() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert running == 2
        may_end.set()
        await asyncio.gather(*ended)


def test_more_biases_than_over_http_are_refused() -> None:
    """Finding 8. Fails without the limit of `SamplingFields.logit_bias`; a message of 64 KiB is not parsed at all."""
    for count in (MAX_LOGIT_BIAS, MAX_LOGIT_BIAS + 1):
        biased = pb.ClientSampling(logit_bias=dict.fromkeys(range(count), 1.0))
        if count == MAX_LOGIT_BIAS:
            assert len(grpc_api._sampling_fields(biased).logit_bias or {}) == count
        else:
            with pytest.raises(RequestError, match=f"{MAX_LOGIT_BIAS}") as refusal:
                grpc_api._sampling_fields(biased)
            assert refusal.value.param == "logit_bias"


async def test_a_client_that_does_not_read_the_usage_ends_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Finding 8: the call stayed open, and a drain waited for it. Fails without the timeout of `_write_usage`."""
    monkeypatch.setattr(grpc_api, "WRITE_TIMEOUT_S", 0.01)

    class Full:
        async def write(self, _: object) -> None:
            await asyncio.get_running_loop().create_future()

    usage = TokenUsage(prompt_tokens=1, completion_tokens=1, cached_tokens=0)
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(TransferTimeout, match="has read nothing"):
            await grpc_api._write_usage(cast(Any, Full()), "gen-1", usage)
