"""Malformed messages over gRPC are the caller's fault: INVALID_ARGUMENT, where grpc answers UNKNOWN and logs it."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"
_Parse = Callable[[bytes], Any]


class ParsingInterceptor(grpc.aio.ServerInterceptor):
    """Parses the requests of all methods that leave parsing to grpc."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """The method's handler, which now gets bytes and parses them by itself; None where there is no such method."""
        handler: Any = await continuation(handler_call_details)
        if handler is None or handler.request_deserializer is None:
            return handler  # type: ignore[no-any-return]
        parse, serialize = handler.request_deserializer, handler.response_serializer
        if handler.stream_stream is not None:
            behavior = _streams(handler.stream_stream, parse)
            return grpc.stream_stream_rpc_method_handler(behavior, response_serializer=serialize)
        if handler.unary_stream is not None:
            behavior = _takes_bytes(handler.unary_stream, parse)
            return grpc.unary_stream_rpc_method_handler(behavior, response_serializer=serialize)
        assert handler.unary_unary is not None, "no service here has a method with a stream of requests and one answer"
        return grpc.unary_unary_rpc_method_handler(
            _takes_bytes(handler.unary_unary, parse), response_serializer=serialize
        )


def _takes_bytes(behavior: Callable[..., Any], parse: _Parse) -> Callable[..., Any]:
    async def call(data: bytes, context: Context) -> Any:
        return await behavior(await _parsed(data, context, parse), context)

    return call


def _streams(behavior: Callable[..., Any], parse: _Parse) -> Callable[..., Any]:
    assert inspect.isasyncgenfunction(behavior), "grpc's reflection is a generator"

    async def call(messages: AsyncIterator[bytes], context: Context) -> AsyncIterator[Any]:
        async def parsed() -> AsyncIterator[Any]:
            async for data in messages:
                yield await _parsed(data, context, parse)

        async for response in behavior(parsed(), context):
            yield response

    return call


async def _parsed(data: bytes, context: Context, parse: _Parse) -> Any:
    try:
        return parse(data)
    except DecodeError:
        await context.abort(
            grpc.StatusCode.INVALID_ARGUMENT, "The message is not valid. Encode it with the .proto files."
        )
