"""Protobuf messages over TCP, one connection for each call: what tokens travel on.

A message goes behind its length: 4 bytes, big-endian. It costs one write here and one read there, in the event loops
themselves, where one of gRPC's wakes several threads (`docs/decisions/0018-tokens-travel-on-plain-connections.md`).
Closing the connection cancels the call, and TCP's window holds back a sender whose peer does not read.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import sys
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

from google.protobuf.message import DecodeError, Message

from pdserve.base.errors import PdserveError
from pdserve.base.logs import get_logger
from pdserve.base.rpc import MAX_MESSAGE_BYTES
from pdserve.base.tasks import service_group

log = get_logger(__name__)

Incoming = TypeVar("Incoming")

_LENGTH = struct.Struct(">I")
#: Messages, and their bytes, that may wait to be read before the connection is not read from any more.
_MAX_WAITING, _MAX_WAITING_BYTES = 64, 1 << 20
#: How long connecting may take: the address is that of a worker that was alive a moment ago.
_CONNECT_TIMEOUT_S = 5.0
#: How long a peer may leave a stream open after it was told of a failure.
_LINGER_S = 10.0
#: A worker's host that is dead, or cut off, is noticed after about this long, also while nobody has anything to say.
_DEAD_AFTER_S = 15
#: Whoever is served may take this long to read again: longer than a router waits for a client that reads nothing. For
#: the kernel a full window and a dead host are the same.
_STALLED_AFTER_S = 75
#: The kernel asks a silent peer after this long and then again: one lost answer is no death.
_ASK_AFTER_S, _ASK_AGAIN_S = 5, 2


class PeerLeft(Exception):
    """The peer has closed the stream: it has all it wants, or is gone."""


class MessageStream(asyncio.Protocol, Generic[Incoming]):
    """One end of a connection. Belongs to the event loop; one task reads, any may write."""

    def __init__(
        self,
        parse: Callable[[bytes], Incoming],
        on_open: Callable[[MessageStream[Incoming]], object] = lambda stream: None,
        *,
        lost_after_s: int = _DEAD_AFTER_S,
    ) -> None:
        """`parse` makes messages of bytes; `on_open` is called with the stream when it is connected.

        `lost_after_s`: how long the peer may confirm nothing, or take nothing of what is sent.
        """
        self._lost_after_s = lost_after_s
        self._loop = asyncio.get_running_loop()
        self._parse = parse
        self._on_open = on_open
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._inbox: deque[Incoming] = deque()
        #: Received since the inbox was found empty: not less than what waits in it.
        self._waiting_bytes = 0
        self._ended = False
        self._reader: asyncio.Future[None] | None = None
        #: When the reader has waited long enough. One timer looks now and then, instead of one for each message.
        self._reader_due: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        #: Set unless the peer is behind.
        self._writable = asyncio.Event()
        self._writable.set()

    async def read(self, silence_s: float | None = None) -> Incoming | None:
        """The next message, None once the peer has closed or is lost. Raises `TimeoutError` after `silence_s`."""
        while not self._inbox:
            if self._ended:
                return None
            assert self._transport is not None, "a stream is read once it is open"
            self._waiting_bytes = 0
            self._transport.resume_reading()
            self._reader = self._loop.create_future()
            self._reader_due = None if silence_s is None else self._loop.time() + silence_s
            if self._reader_due is not None and self._timer is None:
                self._timer = self._loop.call_at(self._reader_due, self._look_at_reader)
            try:
                await self._reader
            finally:
                self._reader = None
        return self._inbox.popleft()

    async def write(self, message: Message) -> None:
        """Sends a message; waits while the peer is behind. To one that is gone nothing is sent: reading tells."""
        if self._ended:
            return
        assert self._transport is not None, "a stream is written to once it is open"
        data = message.SerializeToString()
        self._transport.write(_LENGTH.pack(len(data)) + data)
        if not self._writable.is_set():
            await self._writable.wait()

    def close(self) -> None:
        """Sends what was written and closes the connection."""
        self._end()
        if self._transport is not None:
            self._transport.close()

    # asyncio.Protocol
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The stream is open."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        _notice_dead_hosts(transport.get_extra_info("socket"), self._lost_after_s)
        self._on_open(self)

    def data_received(self, data: bytes) -> None:
        """Some bytes: parts of messages, or several."""
        received, start = self._received, 0
        received += data
        while len(received) - start >= _LENGTH.size:
            begin = start + _LENGTH.size
            (length,) = _LENGTH.unpack_from(received, start)
            if length > MAX_MESSAGE_BYTES:
                self._abort()
                return
            if len(received) - begin < length:
                break
            start = begin + length
            try:
                self._inbox.append(self._parse(bytes(received[begin:start])))
            except DecodeError:
                self._abort()
                return
        del received[:start]
        self._waiting_bytes += start
        if self._inbox:
            self._wake_reader()
        is_full = len(self._inbox) >= _MAX_WAITING or self._waiting_bytes >= _MAX_WAITING_BYTES
        if is_full and self._transport is not None:
            self._transport.pause_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone; what was received can still be read."""
        self._end()

    def pause_writing(self) -> None:
        """The peer is behind."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """The peer has caught up."""
        self._writable.set()

    def _end(self) -> None:
        self._ended = True
        self._writable.set()
        self._wake_reader()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _abort(self) -> None:
        """Whoever this is speaks something else."""
        self._end()
        if self._transport is not None:
            self._transport.abort()

    def _wake_reader(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _look_at_reader(self) -> None:
        self._timer = None
        if self._reader is None or self._reader.done() or self._reader_due is None:
            return
        if self._loop.time() < self._reader_due:
            self._timer = self._loop.call_at(self._reader_due, self._look_at_reader)
        else:
            self._reader.set_exception(TimeoutError())


async def _tell_last(stream: MessageStream[Incoming], message: Message) -> None:
    """The peer closes first: what it says after our end would reset the connection, and the message be lost with it."""
    await stream.write(message)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LINGER_S):
            while await stream.read() is not None:
                pass


async def open_stream(address: str, parse: Callable[[bytes], Incoming]) -> MessageStream[Incoming]:
    """A stream to `host:port`; to be closed. Raises `OSError`, which `TimeoutError` is too."""
    host, _, port = address.rpartition(":")
    async with asyncio.timeout(_CONNECT_TIMEOUT_S):
        _, stream = await asyncio.get_running_loop().create_connection(
            lambda: MessageStream(parse), host.strip("[]"), int(port)
        )
    return stream


@asynccontextmanager
async def serve_streams(
    listener: socket.socket,
    parse: Callable[[bytes], Incoming],
    handle: Callable[[MessageStream[Incoming]], Awaitable[None]],
    failure: Callable[[PdserveError], Message],
) -> AsyncIterator[str]:
    """Has `handle` serve each connection, in a task of its own, until the block ends; yields `host:port`.

    A connection is closed when its handler returns, and at once when it comes as the block ends. What the handler
    raises is the last message, which `failure` makes: our errors as they are, anything else is logged and becomes a
    `PdserveError`. `PeerLeft` is no failure.
    """

    async def serve(stream: MessageStream[Incoming]) -> None:
        try:
            await handle(stream)
        except PeerLeft:
            pass
        except PdserveError as error:
            await _tell_last(stream, failure(error))
        except Exception as error:  # noqa: BLE001 - the border of the process: logged, and told to the caller
            log.error("stream_failed", exc=error)
            told = PdserveError("The call failed unexpectedly; the worker's log has the traceback.")
            await _tell_last(stream, failure(told))

    async with service_group() as group:

        def opened(stream: MessageStream[Incoming]) -> None:
            if group.stopping:
                stream.close()
                return
            # Not by `serve` itself: what is cancelled before its first turn never comes to a `finally`.
            group.start(serve(stream), name="stream").add_done_callback(lambda _: stream.close())

        loop = asyncio.get_running_loop()
        server = await loop.create_server(
            lambda: MessageStream(parse, opened, lost_after_s=_STALLED_AFTER_S), sock=listener
        )
        host, port = listener.getsockname()[:2]
        try:
            yield f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        finally:
            # Of a connection that is accepted and not yet opened when the server closes, asyncio loses hold.
            loop.remove_reader(listener)
            await asyncio.sleep(0)
            server.close()


def _notice_dead_hosts(connection: socket.socket, lost_after_s: int) -> None:
    """Has the kernel ask a silent peer, and not wait for ever for one that confirms nothing."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _ASK_AFTER_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _ASK_AGAIN_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, lost_after_s * 1000)
