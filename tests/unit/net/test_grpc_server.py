"""What a stranger sends to a gRPC port stops no server, and is the stranger's fault."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve.net.rpc import open_channel, serve_grpc
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


async def test_metadata_that_is_no_text_is_in_no_log(address: str, caplog: pytest.LogCaptureFixture) -> None:
    """It may be a key. grpc logs it with a traceback."""
    key = b"Bearer sk-\xff\xfe-secret"
    with caplog.at_level(logging.INFO):
        async with open_channel(address) as channel:
            for _ in range(3):
                await send_metadata(address, key)
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    shown = caplog.text
    assert "sk-" not in shown
    assert "Traceback" not in shown


async def send_metadata(address: str, value: bytes) -> None:
    """A call with this value, which grpc's own client does not send."""

    def header(name: bytes, text: bytes) -> bytes:
        return b"\x00" + bytes((len(name),)) + name + bytes((len(text),)) + text

    fields = {b":method": b"POST", b":scheme": b"http", b":path": CHECK.encode(), b"te": b"trailers"}
    fields |= {b":authority": b"x", b"content-type": b"application/grpc", b"authorization": value}
    block = b"".join(header(name, text) for name, text in fields.items())
    frames = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
    frames += len(block).to_bytes(3, "big") + b"\x01\x04\x00\x00\x00\x01" + block
    frames += b"\x00\x00\x05\x00\x01\x00\x00\x00\x01" + bytes(5)
    host, port = address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frames)
    received = b""
    while b"grpc-status" not in received:
        received += await reader.read(65_536)
    writer.close()
