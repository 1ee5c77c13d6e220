"""Serves connections of `MessageStream`: a task for each, limits on strangers, failures as last messages."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from google.protobuf.message import Message

from pdserve.base.errors import PdserveError
from pdserve.base.logs import get_logger
from pdserve.base.tasks import service_group
from pdserve.net.newcomers import SWEEP_S, Newcomers
from pdserve.net.rpc import MAX_MESSAGE_BYTES
from pdserve.net.streams import CONNECT_TIMEOUT_S, MessageStream, PeerLeft
from pdserve.peers.peer_tls import PeerTls

log = get_logger(__name__)

Incoming = TypeVar("Incoming")

#: Time a peer may leave a stream open after a failure was reported to it.
_LINGER_S = 10.0
#: Time a server allows a peer that does not read: longer than a router waits for a client that does not. The kernel
#: cannot distinguish a full window from a dead host.
_STALLED_AFTER_S = 75
#: Memory for the first messages of newcomers: enough turns for bursts, and little beside a model.
_NEWCOMER_BYTES = 64 << 20
#: Bytes that asyncio reads at a time, which may be beyond a message.
_READ_BYTES = 256 << 10
#: Minimum number of turns of newcomers: one stranger must not block a worker that takes very long prompts.
_MIN_TURNS = 8


@asynccontextmanager
async def serve_streams(
    listener: socket.socket,
    parse: Callable[[bytes], Incoming],
    handle: Callable[[MessageStream[Incoming]], Awaitable[None]],
    failure: Callable[[PdserveError], Message],
    tls: PeerTls | None = None,
    *,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
) -> AsyncIterator[str]:
    """Has `handle` serve each connection, in a task of its own, until the block ends. Yields `host:port`.

    A connection is closed when its handler returns, and immediately if it arrives while the block ends. If the handler
    raises, the last message is the one that `failure` makes of the error; any but a `PdserveError` is logged and
    replaced by one. `PeerLeft` is not a failure. `handle` calls `trust` when it knows who has connected: until then
    the connection counts as a newcomer, which may have to wait before it is read (`Newcomers`). A connection
    with a message beyond `max_message_bytes` is closed.
    """
    # With TLS, a peer has shown a certificate before it is here.
    newcomers = None if tls is not None else Newcomers(max_turns=_max_turns(max_message_bytes))
    async with service_group() as group:
        if newcomers is not None:
            group.start(_sweep(newcomers), name="newcomers")

        def on_open(stream: MessageStream[Incoming]) -> None:
            if group.stopping:
                stream.close()
                return
            # `_serve` does not close the stream: a task cancelled before its first turn never reaches a `finally`.
            serving = group.start(_serve(stream, handle, failure), name="stream")
            serving.add_done_callback(lambda _: stream.close())

        def connection() -> MessageStream[Incoming]:
            limits = {"lost_after_s": _STALLED_AFTER_S, "max_message_bytes": max_message_bytes}
            return MessageStream(parse, on_open, **limits, newcomers=newcomers)

        async with _listening(listener, connection, tls):
            host, port = listener.getsockname()[:2]
            yield f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _max_turns(max_message_bytes: int) -> int:
    return max(_MIN_TURNS, _NEWCOMER_BYTES // (max_message_bytes + _READ_BYTES))


async def _sweep(newcomers: Newcomers) -> None:
    loop = asyncio.get_running_loop()
    while True:
        newcomers.sweep(loop.time())
        await asyncio.sleep(SWEEP_S)


@asynccontextmanager
async def _listening(
    listener: socket.socket, connection: Callable[[], asyncio.Protocol], tls: PeerTls | None
) -> AsyncIterator[None]:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        connection,
        sock=listener,
        ssl=None if tls is None else tls.server_context,
        ssl_handshake_timeout=None if tls is None else CONNECT_TIMEOUT_S,
    )
    try:
        yield
    finally:
        # asyncio forgets a connection that is accepted but not yet opened when its server closes.
        loop.remove_reader(listener)
        await asyncio.sleep(0)
        server.close()


async def _send_last(stream: MessageStream[Incoming], message: Message) -> None:
    """Sends a message and waits for the peer to close.

    If this end closed the connection, anything that the peer still sends would reset it, and the message would be lost.
    """
    await stream.write(message)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LINGER_S):
            while await stream.read() is not None:
                pass


async def _serve(
    stream: MessageStream[Incoming],
    handle: Callable[[MessageStream[Incoming]], Awaitable[None]],
    failure: Callable[[PdserveError], Message],
) -> None:
    try:
        await handle(stream)
    except PeerLeft:
        pass
    except PdserveError as error:
        await _send_last(stream, failure(error))
    except Exception as error:  # noqa: BLE001 - the boundary of the process: logged, and reported to the caller
        log.error("stream_failed", exc=error)
        await _send_last(stream, failure(PdserveError("The call failed unexpectedly. The worker's log says why.")))
