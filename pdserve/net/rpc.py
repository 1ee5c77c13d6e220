"""gRPC between pdserve's processes: errors in transit, channels, servers."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from grpc_health.v1 import health as grpc_health
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from pdserve.base.errors import (
    CapacityError,
    Overloaded,
    PdserveError,
    PeerLost,
    RequestError,
    SetupError,
    TransferTimeout,
    codes_of,
    error_classes,
)
from pdserve.base.ids import Epoch, WorkerId
from pdserve.base.logs import get_logger
from pdserve.base.trace_context import TRACEPARENT, TraceContext, parse_traceparent
from pdserve.base.wire import reported_wait
from pdserve.net.connection_pool import ConnectionPool
from pdserve.net.grpc_server import grpc_server
from pdserve.net.rpc_messages import ParsingInterceptor
from pdserve.peers.peer_tls import PeerTls

log = get_logger(__name__)

_ERROR_KEY = "pdserve-error"
_PARAM_KEY = "pdserve-param"
_RETRY_AFTER_KEY = "pdserve-retry-after"

#: Enough for a prompt of a million tokens. gRPC's default of 4 MiB is not.
MAX_MESSAGE_BYTES = 64 * 1024 * 1024

_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Pings reveal a dead host even while a stream is silent. Servers have to allow that many.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    # Short, to reconnect soon to a restarted worker.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.enable_http_proxy", 0),
    ("grpc.so_reuseport", 0),
    # Channels to the same address must not share a connection with a dead incarnation of the peer.
    ("grpc.use_local_subchannel_pool", 1),
]


#: gRPC's own codes for a broken connection. Errors of pdserve's servers carry their class and are not looked up here.
_BROKEN = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
)


def open_channel(address: str, tls: PeerTls | None = None) -> grpc.aio.Channel:
    """A channel to another process of pdserve."""
    if tls is None:
        return grpc.aio.insecure_channel(address, options=_OPTIONS)
    options = [*_OPTIONS, *tls.channel_options()]
    return grpc.aio.secure_channel(address, tls.channel_credentials(), options=options)


class ChannelPool:
    """One gRPC channel per incarnation of a worker, kept open between calls, and a new one with each certificate."""

    def __init__(self, *, max_kept: int | None = None, tls: PeerTls | None = None) -> None:
        """Beyond `max_kept` channels, the least recently used one without a call is closed; None: no limit."""
        self._tls = tls
        self._pool: ConnectionPool[tuple[WorkerId, Epoch, str, int], grpc.aio.Channel] = ConnectionPool(
            lambda channel: channel.close(), max_kept=max_kept
        )

    def use(self, worker_id: WorkerId, epoch: Epoch, address: str) -> AbstractAsyncContextManager[grpc.aio.Channel]:
        """The channel to that incarnation, which listens at `address`; open at least until the block ends.

        A new channel starts to connect at once, without waiting for its first call. Each address has its own channel:
        a stranger's ticket may name any address for a worker that others call, too.
        """

        async def connect() -> grpc.aio.Channel:
            channel = open_channel(address, self._tls)
            channel.get_state(try_to_connect=True)
            return channel

        return self._pool.use((worker_id, epoch, address, self._generation), connect)

    async def open(self, worker_id: WorkerId, epoch: Epoch, address: str) -> None:
        """Opens the channel ahead of its first call, which then does not wait for the connection."""
        async with self.use(worker_id, epoch, address):
            pass

    async def sweep(self, current: Collection[tuple[WorkerId, Epoch]]) -> None:
        """Closes unused channels to incarnations that are not in `current`."""
        kept = [key for key in self._pool.keys if key[:2] in current and key[3] == self._generation]
        await self._pool.sweep(kept)

    async def close(self) -> None:
        """Closes all channels."""
        await self._pool.close()

    @property
    def _generation(self) -> int:
        return 0 if self._tls is None else self._tls.generation


def trace_metadata(trace: TraceContext | None) -> tuple[tuple[str, str], ...] | None:
    """The metadata that carries a trace context; None without one."""
    return None if trace is None else ((TRACEPARENT, trace.traceparent),)


def trace_of(context: grpc.aio.ServicerContext[Any, Any]) -> TraceContext | None:
    """The trace context that the caller sent, if it did."""
    headers = (value for key, value in context.invocation_metadata() or () if key == TRACEPARENT)
    header = next(headers, None)
    return parse_traceparent(header) if isinstance(header, str) else None


async def abort_with(context: grpc.aio.ServicerContext[Any, Any], error: PdserveError) -> None:
    """Ends a call with `error`, in a form that `error_from_rpc` restores on the other side."""
    metadata = [(_ERROR_KEY, type(error).__name__)]
    if isinstance(error, RequestError) and error.param is not None:
        metadata.append((_PARAM_KEY, error.param))
    if isinstance(error, Overloaded):
        metadata.append((_RETRY_AFTER_KEY, str(error.retry_after_s)))
    # Metadata that the method has set is kept.
    metadata = [*(context.trailing_metadata() or ()), *metadata]
    await context.abort(grpc.StatusCode[codes_of(error).grpc], str(error), trailing_metadata=tuple(metadata))


def error_from_rpc(error: grpc.aio.AioRpcError, *, peer: str) -> PdserveError:
    """The error that the peer raised, or the one that stands for its silence."""
    metadata = {key: str(value) for key, value in error.trailing_metadata() or ()}
    cls = error_classes().get(metadata.get(_ERROR_KEY, ""))
    details = error.details() or ""
    if cls is not None:
        return _restore(cls, details, metadata)
    code = error.code()
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return TransferTimeout(f"{peer} did not answer before the deadline of the call.")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return CapacityError(f"{peer} refused the call: {details}")
    if code in _BROKEN:
        return PeerLost(f"Lost {peer}: {details or code.name}.")
    return PdserveError(f"{peer} failed with gRPC code {code.name}: {details}")


def _restore(cls: type[PdserveError], details: str, metadata: Mapping[str, str]) -> PdserveError:
    if issubclass(cls, Overloaded):
        return cls(details, retry_after_s=reported_wait(metadata.get(_RETRY_AFTER_KEY, "")))
    if issubclass(cls, RequestError):
        return cls(details, param=metadata.get(_PARAM_KEY))
    return cls(details)


@contextmanager
def mapped_rpc_errors(peer: str) -> Iterator[None]:
    """Turns gRPC errors inside the block into pdserve's errors."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise error_from_rpc(error, peer=peer) from error
    except grpc.aio.UsageError as error:
        raise PeerLost(f"Lost {peer}: {error}.") from error


def method(handler: Callable[..., Awaitable[Any]]) -> Any:
    """Wraps a servicer's method: a `PdserveError` becomes its status, any other error is logged and becomes INTERNAL.

    A method that answers with a stream calls `context.write`. Unlike an async generator, it runs in a single task, so
    that its cleanup runs at once when the caller leaves.
    """

    @functools.wraps(handler)
    async def wrapper(self: Any, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            return await handler(self, request, context)
        except PdserveError as error:
            await abort_with(context, error)
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except Exception as error:  # noqa: BLE001 - the boundary of the process: logged, and reported to the caller
            await _abort_unexpected(handler.__name__, context, error)

    return wrapper


async def _abort_unexpected(method: str, context: grpc.aio.ServicerContext[Any, Any], error: Exception) -> None:
    log.error("rpc_failed", exc=error, method=method)
    await abort_with(context, PdserveError(f"{method} failed unexpectedly. The worker's log has the traceback."))


class GrpcHealth:
    """The grpc.health.v1 service of a server. NOT_SERVING at first, and again before the server stops."""

    def __init__(self, services: list[str]) -> None:
        self._names = ["", *services]
        self.servicer = grpc_health.aio.HealthServicer()

    async def set_serving(self, serving: bool) -> None:
        """Sets the status and notifies every watcher."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in self._names:
            await self.servicer.set(name, status)


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcPort:
    """Where a gRPC server listens."""

    host: str
    port: int
    #: The flag that sets the port, for errors.
    flag: str
    #: None: no TLS.
    credentials: grpc.ServerCredentials | None = None
    #: Maximum size of a request. The default is for pdserve's own processes as callers.
    max_request_bytes: int = MAX_MESSAGE_BYTES
    #: Calls at a time, over all connections and of one connection. Further ones are refused, or wait in the client.
    max_calls: int | None = None
    max_calls_per_connection: int | None = None

    def server(self) -> grpc.aio.Server:
        """A server within the limits of this port, which is not open yet."""
        name = "grpc.max_receive_message_length"
        options = [option for option in _OPTIONS if option[0] != name] + [(name, self.max_request_bytes)]
        if self.max_calls_per_connection is not None:
            options.append(("grpc.max_concurrent_streams", self.max_calls_per_connection))
        return grpc_server(options=options, maximum_concurrent_rpcs=self.max_calls, interceptors=[ParsingInterceptor()])

    def bind(self, server: grpc.aio.Server) -> str:
        """Opens the port. Returns `host:port`. Raises `SetupError`."""
        shown = f"[{self.host}]" if ":" in self.host else self.host
        address = f"{shown}:{self.port}"
        try:
            if self.credentials is None:
                bound = server.add_insecure_port(address)
            else:
                bound = server.add_secure_port(address, self.credentials)
        except RuntimeError as error:
            raise SetupError(
                f"Cannot listen on {self.host}:{self.port} for gRPC. "
                f"Free the port, or choose another one with {self.flag}."
            ) from error
        return f"{shown}:{bound}"


def serve_grpc(
    register: Callable[[grpc.aio.Server], None],
    services: list[str],
    *,
    host: str,
    port: int,
    flag: str,
    grace_s: float = 5.0,
) -> AbstractAsyncContextManager[tuple[str, GrpcHealth]]:
    """As `serve_grpc_at`, without TLS."""
    return serve_grpc_at(register, services, GrpcPort(host=host, port=port, flag=flag), grace_s=grace_s)


@asynccontextmanager
async def serve_grpc_at(
    register: Callable[[grpc.aio.Server], None], services: list[str], port: GrpcPort, *, grace_s: float = 5.0
) -> AsyncIterator[tuple[str, GrpcHealth]]:
    """Runs a gRPC server with health and reflection until the block ends. Yields `host:port` and the health service."""
    server = port.server()
    register(server)
    health = GrpcHealth(services)
    await health.set_serving(False)
    health_pb2_grpc.add_HealthServicer_to_server(health.servicer, server)
    reflection.enable_server_reflection([*services, "grpc.health.v1.Health", reflection.SERVICE_NAME], server)
    address = port.bind(server)
    await server.start()
    try:
        yield address, health
    finally:
        await health.set_serving(False)
        await server.stop(grace_s)
