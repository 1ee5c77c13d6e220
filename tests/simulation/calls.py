"""gRPC between simulated processes: the channels, calls and contexts that the product uses, with messages as bytes."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

import grpc

from tests.simulation.loop import Process, current_process
from tests.simulation.network import End, Network

_Status = tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]]
_OK: _Status = (grpc.StatusCode.OK, "", ())


def _error(status: _Status) -> grpc.aio.AioRpcError:
    code, details, trailing = status
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), details=details)


class CallContext:
    """What servicers use of `grpc.aio.ServicerContext`."""

    def __init__(self, end: End, metadata: tuple[tuple[str, str], ...], serialize: Callable[[Any], bytes]) -> None:
        self._end = end
        self._metadata = metadata
        self._serialize = serialize
        self.status = _OK
        self._window = asyncio.Event()
        self._window.set()
        end.on_window = lambda is_open: self._window.set() if is_open else self._window.clear()

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        """What the caller sent."""
        return self._metadata

    def trailing_metadata(self) -> tuple[tuple[str, str], ...]:
        """None is set before the end."""
        return ()

    async def write(self, message: Any) -> None:
        """Sends a message. Waits while the caller is behind."""
        self._end.send(("message", self._serialize(message)))
        await self._window.wait()

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> None:
        """Ends the call with an error."""
        self.status = code, details, tuple(trailing_metadata)
        raise grpc.aio.AbortError


class Server:
    """The methods of one process; `register` of the product's services takes it for a `grpc.aio.Server`."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._handlers: dict[str, Any] = {}
        self._running: set[asyncio.Task[None]] = set()

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """As of grpc.aio: unused, since methods are registered by name, too."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        """As of grpc.aio."""
        self._handlers |= {f"/{service}/{name}": handler for name, handler in handlers.items()}

    def listen(self, address: str) -> None:
        """Takes calls."""
        process = current_process()
        assert process is not None
        self._network.listen(address, process, self._on_open)

    async def stop(self, address: str) -> None:
        """Takes no more calls, and ends those that run."""
        process = current_process()
        assert process is not None
        self._network.unlisten(address, process)
        for task in list(self._running):
            task.cancel()
        if self._running:
            await asyncio.wait(self._running)

    def _on_open(self, end: End) -> None:
        def on_item(item: Any) -> None:
            kind, *rest = item
            if kind == "call":
                task = self._network.loop.create_task(self._serve(end, *rest), name=f"serve {rest[0]}")
                self._running.add(task)
                task.add_done_callback(self._running.discard)
                end.on_lost = lambda error: task.cancel()  # type: ignore[assignment, return-value]
                running.append(task)
            elif running:
                running[0].cancel()

        running: list[asyncio.Task[None]] = []
        end.on_item = on_item

    async def _serve(self, end: End, method: str, metadata: tuple[tuple[str, str], ...], data: bytes) -> None:
        handler = self._handlers[method]
        context = CallContext(end, metadata, handler.response_serializer)
        behavior = handler.unary_stream if handler.response_streaming else handler.unary_unary
        try:
            answer = await behavior(handler.request_deserializer(data), context)
            if not handler.response_streaming:
                end.send(("message", handler.response_serializer(answer)))
        except grpc.aio.AbortError:
            pass
        except asyncio.CancelledError:
            context.status = grpc.StatusCode.CANCELLED, "the call was cancelled", ()
            raise
        except Exception as error:  # noqa: BLE001 - as grpc.aio does
            context.status = grpc.StatusCode.UNKNOWN, f"Unexpected {type(error)}: {error}", ()
        finally:
            end.send(("status", context.status))
            end.close()


class _Call:
    """The caller's side."""

    def __init__(
        self, channel: Channel, method: str, request: bytes, metadata: Any, parse: Callable[[bytes], Any]
    ) -> None:
        self._parse = parse
        self._end: End | None = None
        self._messages: deque[Any] = deque()
        self._status: _Status | None = None
        self._arrived = asyncio.Event()
        self._is_cancelled = False
        opening = (method, tuple(metadata or ()), request)
        self._opening = asyncio.get_running_loop().create_task(self._open(channel, opening), name=f"call {method}")
        channel.calls.add(self)
        self._channel = channel

    async def _open(self, channel: Channel, opening: tuple[Any, ...]) -> None:
        address = channel.address
        try:
            async with asyncio.timeout(20.0):
                end = await channel.network.connect(address, "grpc")
        except (OSError, TimeoutError) as error:
            details = f"failed to connect to all addresses; last error: {address}: {error}"
            self._finish((grpc.StatusCode.UNAVAILABLE, details, ()))
            return
        self._end = end
        end.on_item = self._on_item
        end.on_lost = self._on_lost
        end.send(("call", *opening))

    def _on_item(self, item: Any) -> None:
        kind, content = item
        if kind == "message":
            self._messages.append(content)
            self._arrived.set()
        else:
            self._finish(content)

    def _on_lost(self, error: Exception | None) -> None:
        self._finish((grpc.StatusCode.UNAVAILABLE, "Socket closed" if error is None else str(error), ()))

    def _finish(self, status: _Status) -> None:
        if self._status is None:
            self._status = status
            self._channel.calls.discard(self)
            self._arrived.set()
            if self._end is not None:
                self._end.close()

    def cancel(self) -> bool:
        """Ends the call on both sides."""
        if self._status is not None:
            return False
        self._is_cancelled = True
        self._opening.cancel()
        if self._end is not None:
            self._end.send(("cancel",))
        self._finish((grpc.StatusCode.CANCELLED, "Locally cancelled by application!", ()))
        return True

    async def _next(self) -> Any:
        """The next message; None at the end of the call. Raises its error."""
        while not self._messages:
            if self._is_cancelled:
                raise asyncio.CancelledError
            if self._status is not None:
                if self._status[0] is not grpc.StatusCode.OK:
                    raise _error(self._status)
                return None
            self._arrived.clear()
            try:
                await self._arrived.wait()
            except asyncio.CancelledError:
                self.cancel()
                raise
        return self._parse(self._messages.popleft())

    def __aiter__(self) -> _Call:
        return self

    async def __anext__(self) -> Any:
        message = await self._next()
        if message is None:
            raise StopAsyncIteration
        return message

    def __await__(self) -> Any:
        return self._single().__await__()

    async def _single(self) -> Any:
        message = await self._next()
        if message is None:
            raise _error((grpc.StatusCode.INTERNAL, "the call ended without a message", ()))
        return message


class Channel:
    """What the product uses of `grpc.aio.Channel`. Each call is a connection of its own."""

    def __init__(self, network: Network, address: str) -> None:
        self.network = network
        self.address = address
        self.owner: Process | None = current_process()
        self.calls: set[_Call] = set()

    def unary_unary(self, method: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        """As of grpc.aio."""

        def call(request: Any, *, timeout: float | None = None, metadata: Any = None, **_: Any) -> Any:
            made = _Call(self, method, request_serializer(request), metadata, response_deserializer)
            return made if timeout is None else _within(made, timeout)

        return call

    def unary_stream(self, method: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        """As of grpc.aio."""
        return self.unary_unary(method, request_serializer, response_deserializer)

    stream_unary = stream_stream = unary_unary

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """Nothing is connected ahead."""
        return grpc.ChannelConnectivity.IDLE

    async def close(self, grace: float | None = None) -> None:
        """Cancels its calls."""
        for call in sorted(self.calls, key=lambda call: call._opening._serial):  # type: ignore[attr-defined]
            call.cancel()


async def _within(call: _Call, timeout_s: float) -> Any:
    try:
        async with asyncio.timeout(timeout_s):
            return await call
    except TimeoutError:
        raise _error((grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", ())) from None
