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
    """The listener's end: reads announcements."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._unread = b""
        self._pair: Pair | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._pair = self._listener.accept(transport)

    def data_received(self, data: bytes) -> None:
        self._unread += data
        whole = len(self._unread) - len(self._unread) % _ANNOUNCEMENT.size
        announcements, self._unread = self._unread[:whole], self._unread[whole:]
        for tag, num_bytes in _ANNOUNCEMENT.iter_unpack(announcements):
            if self._pair is not None and not self._pair.lost:
                self._listener.announced(self._pair, tag, num_bytes)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._pair is not None:
            self._listener.lose(self._pair)


class ConnectorControl(asyncio.Protocol):
    """The connector's end: reads the greeting, and notices that the listener is gone."""

    def __init__(self) -> None:
        self.greeting: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.on_lost: Callable[[], None] = lambda: None
        self._unread = b""

    def data_received(self, data: bytes) -> None:
        self._unread += data
        if len(self._unread) >= _GREETING.size and not self.greeting.done():
            self.greeting.set_result(_GREETING.unpack_from(self._unread)[0])

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.greeting.done():
            self.greeting.set_exception(PeerLost("The listener closed the connection."))
            self.greeting.exception()  # Marked as retrieved: `connect` may have given up before.
        self.on_lost()
