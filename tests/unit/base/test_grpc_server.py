"""What a stranger sends to a gRPC port stops no server, and is the stranger's fault."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve.base.rpc import open_channel, serve_grpc
from tests.fuzz.grpc.area import AREA

CHECK = "/grpc.health.v1.Health/Check"
REFLECT = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


@pytest.fixture
async def address() -> AsyncIterator[str]:
    """A server with health and reflection."""
    async with serve_grpc(lambda server: None, [], host="127.0.0.1", port=0, flag="--grpc-port") as (address, _):
        yield address


async def test_a_method_name_that_is_no_text_stops_no_server(address: str) -> None:
    """grpc 1.83 to 1.85 decode it in the loop that accepts all calls, which ends the server."""
    host, port = address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write((AREA.corpus / "port" / "method-name-is-no-text.bin").read_bytes())
    writer.write_eof()
    while await reader.read(65_536):
        pass
    writer.close()
    async with open_channel(address) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.mark.parametrize("method", [CHECK, REFLECT])
async def test_a_message_that_cannot_be_parsed_is_the_callers_fault(address: str, method: str) -> None:
    async with open_channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            if method == CHECK:
                await channel.unary_unary(method)(b"\xff")
            else:
                [_ async for _ in channel.stream_stream(method)([b"\xff"])]
    assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_an_unknown_method_is_unimplemented(address: str) -> None:
    async with open_channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await channel.unary_unary("/a.B/C")(b"")
    assert refusal.value.code() is grpc.StatusCode.UNIMPLEMENTED
