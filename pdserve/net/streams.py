"""Protobuf messages over TCP, one connection per call. Tokens travel this way.

A message follows its length: 4 bytes, big-endian. It costs one write and one read, in the event loops themselves. A
message of gRPC wakes several threads (`docs/decisions/0018-tokens-travel-on-plain-connections.md`). Closing the
connection cancels the call, and TCP's window holds back a sender whose peer does not read. `stream_server` serves them.
"""

from __future__ import annotations

import asyncio
import errno
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from google.protobuf.message import DecodeError, Message

from pdserve.net.dead_hosts import notice_dead_hosts
from pdserve.net.frames import Frames, framed
from pdserve.net.newcomers import Newcomers, host_of
from pdserve.net.no_delay import send_at_once
from pdserve.net.rpc import MAX_MESSAGE_BYTES
from pdserve.peers.peer_tls import PeerTls

Incoming = TypeVar("Incoming")

#: Limits on received messages, and on their bytes, beyond which the connection is not read until they are taken.
_MAX_WAITING, _MAX_WAITING_BYTES = 64, 1 << 20
#: Time between a reader's time limit and its timeout.
_LAST_LOOK_S = 0.01
#: Limit for connecting to a worker, which was alive shortly before.
CONNECT_TIMEOUT_S = 5.0
#: Time until a worker's host that is dead or cut off is noticed, even while no messages are sent.
_DEAD_AFTER_S = 15


class PeerLeft(Exception):
    """The peer has closed the stream, because it has everything it needs or is gone."""


class MessageStream(asyncio.Protocol, Generic[Incoming]):
    """One end of a connection. Belongs to the event loop. One task reads; any task may write."""

    def __init__(
        self,
        parse: Callable[[bytes], Incoming],
        on_open: Callable[[MessageStream[Incoming]], object] = lambda stream: None,
        *,
        lost_after_s: int = _DEAD_AFTER_S,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        newcomers: Newcomers | None = None,
    ) -> None:
        """`parse` turns bytes into a message. `on_open` is called with the stream once it is connected.

        `lost_after_s`: time the peer may acknowledge no data, or accept none, before it counts as lost.
        """
        self._lost_after_s = lost_after_s
        #: The newcomers to which the stream belongs until `trust` is called. It is open once it has its turn.
        self._newcomers = newcomers
        self._loop = asyncio.get_running_loop()
        self._parse = parse
        self._on_open = on_open
        self._transport: asyncio.Transport | None = None
        self._received = Frames(max_message_bytes)
        self._inbox: deque[Incoming] = deque()
        #: Bytes received since the inbox was last empty: an upper bound of the bytes in it.
        self._waiting_bytes = 0
        self._ended = False
        self._reader: asyncio.Future[None] | None = None
        #: When the reader times out. One timer checks it now and then, which saves a timer per message.
        self._reader_due: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        #: Whether the reader has timed out, but what arrived while this process was stopped has still to be read.
        self._is_overdue = False
        #: Set unless the peer is behind with reading.
        self._writable = asyncio.Event()
        self._writable.set()
        #: Whether something was written since the last `keep_alive`.
        self._has_written = False

    @property
    def is_open(self) -> bool:
        """Whether the peer has neither closed nor sent anything that is unread."""
        return not self._ended and not self._inbox

    async def read(self, silence_s: float | None = None) -> Incoming | None:
        """The next message, or None once the peer has closed or is lost. Raises `TimeoutError` after `silence_s`."""
        while not self._inbox:
            if self._received.has_more:
                await asyncio.sleep(0)  # Other callbacks get their turn between the pieces of a flood.
                self._parse_some()
                continue
            if self._ended:
                return None
            assert self._transport is not None, "a stream is read once it is open"
            self._waiting_bytes = 0
            self._transport.resume_reading()
            self._reader = self._loop.create_future()
            self._reader_due = None if silence_s is None else self._loop.time() + silence_s
            if self._reader_due is not None and self._timer is None:
                self._timer = self._loop.call_at(self._reader_due, self._check_reader)
            try:
                await self._reader
            finally:
                self._reader = None
        return self._inbox.popleft()

    async def write(self, message: Message) -> None:
        """Sends a message and waits while the peer is behind. Does nothing once the peer is gone."""
        if self._ended:
            return
        self._send(message)
        self._has_written = True
        if not self._writable.is_set():
            await self._writable.wait()

    def keep_alive(self, message: Message) -> None:
        """Sends a message unless something was written since the last call, or the peer is behind with reading."""
        if not self._has_written and not self._ended and self._writable.is_set():
            self._send(message)
        self._has_written = False

    def abort(self) -> None:
        """Closes at once: the peer speaks another protocol, or is a stranger."""
        self._received.clear()
        self._end()
        if self._transport is not None:
            self._transport.abort()

    def trust(self) -> None:
        """The peer is one of the cluster: the stream is no newcomer any more. Its turn goes to the next one."""
        newcomers, self._newcomers = self._newcomers, None
        if newcomers is not None:
            newcomers.remove(self, self._loop.time())

    def _send(self, message: Message) -> None:
        assert self._transport is not None, "a stream is written to once it is open"
        self._transport.write(framed(message.SerializeToString()))

    def close(self) -> None:
        """Flushes written messages and closes the connection."""
        self._end()
        if self._transport is not None:
            self._transport.close()

    # asyncio.Protocol
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The stream is open, or waits for its turn."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        send_at_once(transport.get_extra_info("socket"))
        notice_dead_hosts(transport.get_extra_info("socket"), self._lost_after_s)
        if self._newcomers is None:
            self._on_open(self)
        else:
            transport.pause_reading()
            self._loop.call_soon(self._pause_again)
            peer = transport.get_extra_info("peername")  # None: it has left already.
            self._newcomers.add(self, "" if peer is None else host_of(peer[0]), self._loop.time())

    def _pause_again(self) -> None:
        """Early releases of Python 3.11, as in Debian 12, read a transport that `connection_made` has paused."""
        transport = self._transport
        if transport is not None and not transport.is_closing() and not transport.is_reading():
            transport.resume_reading()
            transport.pause_reading()

    def begin_turn(self) -> None:
        """The stream is open, after it has waited among the newcomers."""
        assert self._transport is not None, "a stream waits for its turn once it is connected"
        self._transport.resume_reading()
        self._on_open(self)

    def data_received(self, data: bytes) -> None:
        """Takes bytes, which may hold several messages or a fraction of one."""
        self._received.add(data)
        self._waiting_bytes += len(data)
        self._parse_some()
        if self._newcomers is not None:
            self._newcomers.heard(self, self._loop.time())
        if self._inbox:
            self._wake_reader()
        is_full = len(self._inbox) >= _MAX_WAITING or (self._inbox and self._waiting_bytes >= _MAX_WAITING_BYTES)
        if is_full and self._transport is not None:
            self._transport.pause_reading()

    def _parse_some(self) -> None:
        """Parses as many messages as may wait. Thousands of tiny ones are parsed as they are taken."""
        try:
            messages = self._received.take(_MAX_WAITING - len(self._inbox))
            self._inbox.extend(map(self._parse, messages))
        except (DecodeError, ValueError):
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone. Messages already received can still be read."""
        self._end()

    def pause_writing(self) -> None:
        """The peer is behind."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """The peer has caught up."""
        self._writable.set()

    def _end(self) -> None:
        self._ended = True
        self.trust()  # An ended stream needs no turn.
        self._writable.set()
        self._wake_reader()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wake_reader(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _check_reader(self) -> None:
        self._timer = None
        is_overdue, self._is_overdue = self._is_overdue, False
        if self._reader is None or self._reader.done() or self._reader_due is None:
            return
        if self._loop.time() < self._reader_due:
            self._timer = self._loop.call_at(self._reader_due, self._check_reader)
        elif not is_overdue:
            # The reader gets more time: if this process was stopped, the loop first reads what waits in the socket.
            self._is_overdue = True
            self._timer = self._loop.call_later(_LAST_LOOK_S, self._check_reader)
        else:
            self._reader.set_exception(TimeoutError())


async def open_stream(
    address: str, parse: Callable[[bytes], Incoming], tls: PeerTls | None = None
) -> MessageStream[Incoming]:
    """Connects to `host:port`. The caller closes the stream. Raises `OSError`, of which `TimeoutError` is one."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            _, stream = await asyncio.get_running_loop().create_connection(
                lambda: MessageStream(parse),
                host,
                int(port),
                ssl=None if tls is None else tls.client_context,
                server_hostname=None if tls is None else tls.server_name or host,
            )
    except OSError:
        raise
    except (ValueError, OverflowError) as error:  # No name or port that Python would connect to, or name over TLS.
        raise OSError(errno.EINVAL, f"{address[:100]!r} is no address ({error})") from error
    return stream
