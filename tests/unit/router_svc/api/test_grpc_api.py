"""What a gRPC client may send at a time, and how long it may leave an answer unread."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import grpc
import pytest

from pdserve.base.errors import RequestError, TransferTimeout
from pdserve.base.sampling import MAX_LOGIT_BIAS
from pdserve.net.rpc import GrpcPort, open_channel
from pdserve.v1 import inference_pb2 as pb
from router_svc.api import grpc_api, grpc_output
from router_svc.api.grpc_api import public_port
from router_svc.config import RouterConfig
from router_svc.request.stream import TokenUsage
from tests.support.deadline import DEADLINE_S

METHOD = f"/{grpc_api.SERVICE}/Generate"
#: A setting of HTTP/2.
MAX_CONCURRENT_STREAMS = 3
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
    return RouterConfig(model=(str(model_dir),), redis_url="", port=0, max_body=100_000, max_num_queued_reqs=1)


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


async def test_calls_at_a_time_are_bounded(config: RouterConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finding 8. One place in the queue and one call beyond it are two. Fails without `max_calls` in `public_port`."""
    monkeypatch.setattr(grpc_api, "_CALLS_BEYOND_QUEUE", 1)
    may_end = asyncio.Event()

    async def handler(data: bytes, _: object) -> bytes:
        await may_end.wait()
        return data

    async with (
        served(public_port(config, None), handler) as address,
        asyncio.timeout(DEADLINE_S),
        open_channel(address) as channel,
    ):
        ended = [asyncio.ensure_future(channel.unary_unary(METHOD)(b"").code()) for _ in range(3)]
        [refused], others = await asyncio.wait(ended, return_when=asyncio.FIRST_COMPLETED)
        assert refused.result() is grpc.StatusCode.RESOURCE_EXHAUSTED
        may_end.set()
        assert await asyncio.gather(*others) == [grpc.StatusCode.OK] * 2


async def test_a_connection_is_granted_a_bounded_number_of_calls(config: RouterConfig) -> None:
    """Finding 8. Fails without `max_calls_per_connection` in `public_port`: the server then grants any number."""

    async def handler(data: bytes, _: object) -> bytes:
        return data

    async with served(public_port(config, None), handler) as address, asyncio.timeout(DEADLINE_S):
        reader, writer = await asyncio.open_connection(*address.split(":"))
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5))
        head = await reader.readexactly(9)
        assert head[3] == 4  # SETTINGS: pairs of 16 and 32 bits.
        settings = await reader.readexactly(int.from_bytes(head[:3], "big"))
        writer.close()
    granted = dict(struct.iter_unpack(">HI", settings))
    assert granted[MAX_CONCURRENT_STREAMS] == 1024


def test_more_biases_than_over_http_are_refused() -> None:
    """Finding 8. Fails without the count of `logit_bias` in `validate`. A message of 64 KiB is not parsed at all."""
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
    monkeypatch.setattr(grpc_output, "WRITE_TIMEOUT_S", 0.01)

    class Full:
        async def write(self, _: object) -> None:
            await asyncio.get_running_loop().create_future()

    usage = TokenUsage(prompt_tokens=1, completion_tokens=1, cached_tokens=0)
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(TransferTimeout, match="has read nothing"):
            await grpc_output._write_usage(cast(Any, Full()), "gen-1", usage, "")
