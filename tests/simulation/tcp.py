"""Connections of `loop.create_connection` and `loop.create_server`, over the simulated network."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

from tests.simulation.loop import current_process
from tests.simulation.network import End, Network


class FakeSocket:
    """What the product asks of the socket below a transport, or of one that listens."""

    family = socket.AF_UNIX  # Without the options of TCP.

    def __init__(self, host: str = "", port: int = 0) -> None:
        self._name = host, port

    def setsockopt(self, *_: Any) -> None:
        """The network gives up on dead hosts by itself."""

    def getsockname(self) -> tuple[str, int]:
        """Host and port."""
        return self._name

    def close(self) -> None:
        """Nothing is open."""


class TcpTransport(asyncio.Transport):
    """One end of a connection, as asyncio's protocols see it."""

    def __init__(self, end: End, protocol: asyncio.Protocol) -> None:
        super().__init__({"socket": FakeSocket(), "peername": (end.peer.owner.name, 1)})
        self._end = end
        self._protocol = protocol
        self._loop = asyncio.get_running_loop()
        self._is_closing = False
        end.on_item = self._on_item
        end.on_lost = self._on_lost
        end.on_window = self._on_window

    def _on_item(self, item: bytes) -> None:
        if not self._is_closing:
            self._protocol.data_received(item)

    def _on_lost(self, error: Exception | None) -> None:
        if error is None:
            self._protocol.eof_received()
        self._is_closing = True
        self._protocol.connection_lost(error)

    def _on_window(self, is_open: bool) -> None:
        if is_open:
            self._protocol.resume_writing()
        else:
            self._protocol.pause_writing()

    def write(self, data: Any) -> None:
        if not self._is_closing:
            self._end.send(bytes(data))

    def pause_reading(self) -> None:
        self._end.pause()

    def resume_reading(self) -> None:
        self._end.resume()

    def is_reading(self) -> bool:
        return self._end.is_reading and not self._is_closing

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        self._finish(self._end.close)

    def abort(self) -> None:
        self._finish(self._end.reset)

    def _finish(self, end: Callable[[], None]) -> None:
        if not self._is_closing:
            self._is_closing = True
            end()
            self._loop.call_soon(self._protocol.connection_lost, None)


class TcpServer:
    """What `create_server` returns."""

    def __init__(self, close: Callable[[], None]) -> None:
        self.close = close


def install(network: Network) -> None:
    """Has the loop open its connections over `network`."""
    loop = network.loop

    async def connect(factory: Callable[[], asyncio.Protocol], address: str) -> tuple[TcpTransport, asyncio.Protocol]:
        end = await network.connect(address, "tcp")
        protocol = factory()
        transport = TcpTransport(end, protocol)
        protocol.connection_made(transport)
        return transport, protocol

    def listen(factory: Callable[[], asyncio.Protocol], sock: FakeSocket) -> TcpServer:
        process = current_process()
        assert process is not None
        address = "{}:{}".format(*sock.getsockname())

        def on_open(end: End) -> None:
            protocol = factory()
            protocol.connection_made(TcpTransport(end, protocol))

        network.listen(address, process, on_open)
        return TcpServer(lambda: network.unlisten(address, process))

    loop.open_connection, loop.open_server = connect, listen
