"""Compressed messages over gRPC, which grpc unpacks by itself."""

from __future__ import annotations

import grpc
import pytest

from pdserve.net.rpc import GrpcPort

LIMIT = 65_536


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
async def test_a_compressed_message_counts_as_what_it_unpacks_to(compression: grpc.Compression) -> None:
    """Fails without `max_request_bytes`: 16 KiB here are 16 MiB."""
    received: list[int] = []

    async def call(request: bytes, _: object) -> bytes:
        received.append(len(request))
        return b""

    port = GrpcPort(host="127.0.0.1", port=0, flag="--grpc-port", max_request_bytes=LIMIT)
    server = port.server()
    server.add_registered_method_handlers("test.Test", {"Call": grpc.unary_unary_rpc_method_handler(call)})
    address = port.bind(server)
    await server.start()
    try:
        async with grpc.aio.insecure_channel(address, options=[("grpc.max_send_message_length", -1)]) as channel:
            send = channel.unary_unary("/test.Test/Call")
            await send(bytes(LIMIT), compression=compression)
            for size in (LIMIT + 1, 16 << 20):
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await send(bytes(size), compression=compression)
                assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    finally:
        await server.stop(0)
    assert received == [LIMIT]
