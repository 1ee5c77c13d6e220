"""The control connection of a pair: the listener's greeting, and the connector's announcements of messages."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from typing import Protocol

from kvtransfer.transport.torch_distributed.pair import Pair
from pdserve.base.errors import PeerLost

#: Number of the pair.
_GREETING = struct.Struct("<Q")
#: Tag and bytes of the next payload.
_ANNOUNCEMENT = struct.Struct("<QQ")
#: Announcements that are handled before other callbacks of the event loop get their turn.
_AT_ONCE = 64
#: Messages of a pair that may be under way; then no announcement is read for this long. Handovers stay below.
_MAX_UNDER_WAY, _LOOK_AGAIN_S = 8192, 0.01


def greet(control: asyncio.Transport, number: int) -> None:
    """Sends the listener's greeting."""
    control.write(_GREETING.pack(number))


def announce(control: asyncio.Transport, tag: int, num_bytes: int) -> None:
    """Announces the connector's next message."""
    control.write(_ANNOUNCEMENT.pack(tag, num_bytes))


class Listener(Protocol):
    """The transport that control connections arrive at."""

    def accept(self, control: asyncio.Transport) -> Pair | None:
        """A process connected. None when it is refused."""

    def announced(self, pair: Pair, tag: int, num_bytes: int) -> None:
        """The pair's next message has this tag and size."""

    def lose(self, pair: Pair) -> None:
        """The connection ended."""


class ListenerControl(asyncio.Protocol):
    """The listener's end: reads announcements, some at a time, and no more while many messages are under way."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._unread = bytearray()
        self._pair: Pair | None = None
        self._transport: asyncio.Transport | None = None
        #: Set while announcements wait in `_unread`.
        self._next_turn: asyncio.Handle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._pair = self._listener.accept(transport)

    def data_received(self, data: bytes) -> None:
        self._unread += data
        if self._next_turn is None:
            self._take_turn()

    def _take_turn(self) -> None:
        self._next_turn = None
        pair, transport = self._pair, self._transport
        if pair is None or pair.lost or transport is None:
            self._unread.clear()
            return
        whole = len(self._unread) - len(self._unread) % _ANNOUNCEMENT.size
        taken = min(whole, _AT_ONCE * _ANNOUNCEMENT.size) if pair.num_announced < _MAX_UNDER_WAY else 0
        announcements = bytes(self._unread[:taken])
        del self._unread[:taken]
        for tag, num_bytes in _ANNOUNCEMENT.iter_unpack(announcements):
            if not pair.lost:
                self._listener.announced(pair, tag, num_bytes)
        if taken == whole:
            transport.resume_reading()
            return
        transport.pause_reading()
        loop = asyncio.get_running_loop()
        self._next_turn = loop.call_soon(self._take_turn) if taken else loop.call_later(_LOOK_AGAIN_S, self._take_turn)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._next_turn is not None:
            self._next_turn.cancel()
        if self._pair is not None:
            self._listener.lose(self._pair)


class ConnectorControl(asyncio.Protocol):
    """The connector's end: reads the greeting, and notices that the listener is gone."""

    def __init__(self) -> None:
        self.greeting: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.on_lost: Callable[[], None] = lambda: None
        self._unread = b""

    def data_received(self, data: bytes) -> None:
        if self.greeting.done():
            return  # Nothing follows a greeting.
        self._unread += data
        if len(self._unread) >= _GREETING.size:
            self.greeting.set_result(_GREETING.unpack_from(self._unread)[0])

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.greeting.done():
            self.greeting.set_exception(PeerLost("The listener closed the connection."))
            self.greeting.exception()  # Marked as retrieved: `connect` may have given up before.
        self.on_lost()
