"""A connected Unix socket of packets on the event loop: packets leave in order, also where the other end reads late."""

from __future__ import annotations

import asyncio
import os
import socket
from collections import deque
from collections.abc import Callable

from kvtransfer.transport.local.packets import MAX_PACKET_BYTES

#: Packets read before the event loop gets a turn.
_AT_ONCE = 16


class PacketSocket:
    """Reads packets from now on. Belongs to the event loop."""

    def __init__(
        self, own: socket.socket, on_packet: Callable[[bytes, int | None], None], on_end: Callable[[], None]
    ) -> None:
        """`on_packet` gets each packet with the descriptor that came with it, which it closes; it may call `close`.

        `on_end` is called once, when the other end is gone.
        """
        self._socket = own
        self._on_packet = on_packet
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[tuple[bytes, int | None]] = deque()
        self.is_closed = False
        self._loop.add_reader(own, self._read)

    def send(self, packet: bytes, descriptor: int | None = None) -> None:
        """Sends a packet now or, behind others, when the other end has read some. The socket copies `descriptor`."""
        if self.is_closed:
            return
        if self._waiting or not self._send_now(packet, descriptor):
            if not self._waiting:
                self._loop.add_writer(self._socket, self._send_waiting)
            self._waiting.append((packet, None if descriptor is None else os.dup(descriptor)))

    def close(self) -> None:
        """Ends the connection. Nothing is called any more."""
        if self.is_closed:
            return
        self.is_closed = True
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        for _, descriptor in self._waiting:
            if descriptor is not None:
                os.close(descriptor)
        self._waiting.clear()

    def _send_now(self, packet: bytes, descriptor: int | None) -> bool:
        """Whether the packet has left; the connection has ended where it never will."""
        try:
            if descriptor is None:
                self._socket.send(packet)
            else:
                socket.send_fds(self._socket, [packet], [descriptor])
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            self._end()
        return True

    def _send_waiting(self) -> None:
        while self._waiting and not self.is_closed:
            packet, descriptor = self._waiting[0]
            if not self._send_now(packet, descriptor):
                return
            if self._waiting:  # Else the connection has ended.
                self._waiting.popleft()
                if descriptor is not None:
                    os.close(descriptor)
        if not self.is_closed:
            self._loop.remove_writer(self._socket)

    def _read(self) -> None:
        for _ in range(_AT_ONCE):
            if self.is_closed:
                return
            try:
                packet, [*descriptors], _, _ = socket.recv_fds(self._socket, MAX_PACKET_BYTES, 1)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                packet, descriptors = b"", []
            if packet:
                self._on_packet(packet, descriptors[0] if descriptors else None)
                continue
            for descriptor in descriptors:
                os.close(descriptor)
            self._end()
            return

    def _end(self) -> None:
        if not self.is_closed:
            self.close()
            self._on_end()
