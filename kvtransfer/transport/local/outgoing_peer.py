"""A connection to a receiver of this host: offers messages, and hears which of them were taken."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from kvtransfer.transport.base import Buffer, Operation
from kvtransfer.transport.local import packets
from kvtransfer.transport.local.packet_socket import PacketSocket
from pdserve.base.errors import PeerLost
from pdserve.base.shared_memory import SharedMemory


class LocalPeer:
    """A receiver that was connected to. Implements `kvtransfer.transport.base.Peer`."""

    def __init__(
        self,
        connected: socket.socket,
        token: bytes,
        memories: Sequence[SharedMemory],
        on_end: Callable[[LocalPeer], None],
    ) -> None:
        """`memories`: those that the receiver maps before it accepts. `on_end` is called when the connection ends."""
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        #: Done when the receiver has accepted the connection, and mapped the memory.
        self.welcome: asyncio.Future[None] = self._loop.create_future()
        self._socket = PacketSocket(connected, self._on_packet, self._lost)
        self._unfinished: dict[int, Operation] = {}
        self._offers: list[packets.Offer] = []
        self._flush: asyncio.Handle | None = None
        #: Memory that the receiver knows, by number; that of single messages also by their tags.
        self._known: dict[SharedMemory, int] = {}
        self._of_message: dict[int, SharedMemory] = {}
        self._next_number = 0
        self._socket.send(packets.hello(token, len(memories)))
        for memory in memories:
            self._show(memory)

    @property
    def closed(self) -> bool:
        """Whether sends are impossible."""
        return self._socket.is_closed

    def send(self, send: Operation, memories: Iterable[SharedMemory]) -> None:
        """Offers a message with the next ones of this turn. Bytes outside of `memories` are copied before."""
        if self.closed:
            send.fail(PeerLost("The peer was disconnected."))
            return
        try:
            self._offer(send, memories)
        except OSError as error:  # No memory for a copy, or no descriptor.
            send.fail(PeerLost(f"The message cannot be offered: {error}."))
            return
        self._unfinished[send.tag] = send
        if self._flush is None:
            self._flush = self._loop.call_soon(self._send_offers)

    def _offer(self, send: Operation, memories: Iterable[SharedMemory]) -> None:
        for memory in memories:
            if (start := memory.offset_of(send.buffer)) is not None:
                break
        else:
            memory, start = _copied(send.buffer), 0
            self._of_message[send.tag] = memory
        number = self._known.get(memory)
        if number is None:
            number = self._show(memory)
        self._offers.append(packets.Offer(send.tag, number, start, send.buffer.nbytes))

    def forget(self, memory: SharedMemory) -> None:
        """The receiver may unmap the memory, of which it is offered nothing more."""
        if (number := self._known.pop(memory, None)) is not None:
            self._socket.send(packets.forget(number))

    def end(self, reason: PeerLost) -> None:
        """Ends the connection. What the receiver copies from now on is of no transfer that is committed."""
        if not self._socket.is_closed:
            self._socket.close()
            self._ended(reason)

    def _lost(self) -> None:
        self._ended(PeerLost("The peer has ended, or closed its transport."))

    def _ended(self, reason: PeerLost) -> None:
        if self._flush is not None:
            self._flush.cancel()
        self._offers.clear()
        self._known.clear()
        self._of_message.clear()
        if not self.welcome.done():
            self.welcome.set_exception(reason)
        self._on_end(self)
        unfinished, self._unfinished = self._unfinished, {}
        for send in unfinished.values():
            send.fail(reason)

    def _show(self, memory: SharedMemory) -> int:
        number = self._known[memory] = self._next_number
        self._next_number += 1
        self._socket.send(packets.memory(number, memory.num_bytes), memory.file)
        return number

    def _send_offers(self) -> None:
        self._flush = None
        offers, self._offers = self._offers, []
        for packet in packets.offers(offers):
            self._socket.send(packet)

    def _on_packet(self, packet: bytes, descriptor: int | None) -> None:
        kind, body = packet[:1], packet[1:]
        if descriptor is not None:
            os.close(descriptor)
        try:
            if kind == packets.WELCOME and not self.welcome.done():
                self.welcome.set_result(None)
            elif kind == packets.TAKEN and descriptor is None:
                for tag in packets.read_taken(body):
                    self._taken(tag)
            else:
                raise packets.Malformed
        except packets.Malformed:
            self.end(PeerLost("The peer sends what no worker sends."))

    def _taken(self, tag: int) -> None:
        if (memory := self._of_message.pop(tag, None)) is not None:
            self.forget(memory)
            memory.close()
        if (send := self._unfinished.pop(tag, None)) is not None:
            send.complete()


def _copied(buffer: Buffer) -> SharedMemory:
    memory = SharedMemory(buffer.nbytes)
    np.copyto(memory.bytes, buffer)
    return memory
