"""A connection to a receiver of this host: offers blocks, and hears which offers have ended."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Sequence

from kvtransfer.transport.base import Operation
from kvtransfer.transport.local import packets
from kvtransfer.transport.local.offer import Offer
from kvtransfer.transport.local.packet_socket import PacketSocket
from pdserve.base.errors import PeerLost
from pdserve.base.shared_memory import ShareableMemory


class LocalPeer:
    """A receiver that was connected to. Implements `kvtransfer.transport.base.Peer`."""

    def __init__(
        self,
        connected: socket.socket,
        token: bytes,
        memories: Sequence[ShareableMemory],
        on_end: Callable[[LocalPeer], None],
    ) -> None:
        """`memories`: those that the receiver maps before it accepts. `on_end` is called when the connection ends."""
        self._on_end = on_end
        #: Done when the receiver has accepted the connection, and mapped the memory.
        self.welcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._socket = PacketSocket(connected, self._on_packet, self._lost)
        #: Whether blocks are copied to host memory to be offered.
        self.is_staged = any(memory.is_pinned for memory in memories)
        #: Offers that have not ended, by their first tags.
        self._unfinished: dict[int, Operation] = {}
        #: Memory that the receiver knows, by number.
        self._known: dict[ShareableMemory, int] = {}
        self._next_number = 0
        self._socket.send(packets.hello(token, len(memories)))
        for memory in memories:
            self._show(memory)

    @property
    def closed(self) -> bool:
        """Whether offers are impossible."""
        return self._socket.is_closed

    def offer(self, memory: ShareableMemory, offer: Offer) -> Operation:
        """Offers blocks in a memory, which the receiver maps if it does not know it."""
        operation = Operation(offer.first_tag, memory.bytes)
        if self.closed:
            operation.fail(PeerLost("The peer was disconnected."))
            return operation
        self._unfinished[offer.first_tag] = operation
        try:
            number = self._known.get(memory)
            if number is None:
                number = self._show(memory)
            self._socket.send(packets.offer(number, offer))
        except OSError as error:  # No descriptor for the memory.
            self.end(PeerLost(f"Blocks cannot be offered: {error}."))
        return operation

    def forget(self, memory: ShareableMemory) -> None:
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
        self._known.clear()
        if not self.welcome.done():
            self.welcome.set_exception(reason)
        self._on_end(self)
        unfinished, self._unfinished = self._unfinished, {}
        for operation in unfinished.values():
            operation.fail(reason)

    def _show(self, memory: ShareableMemory) -> int:
        number = self._known[memory] = self._next_number
        self._next_number += 1
        kind = packets.MEMORY
        if memory.is_on_gpu or memory.is_pinned:
            kind = packets.GPU_MEMORY if memory.is_on_gpu else packets.PINNED_MEMORY
        self._socket.send(packets.memory(number, memory.num_bytes, kind), memory.file)
        return number

    def _on_packet(self, packet: bytes, descriptor: int | None) -> None:
        kind, body = packet[:1], packet[1:]
        if descriptor is not None:
            os.close(descriptor)
        try:
            if kind == packets.WELCOME and not self.welcome.done():
                self.welcome.set_result(None)
            elif kind == packets.REFUSED:
                self.end(PeerLost(f"The peer cannot map this worker's memory: {packets.read_refused(body)}."))
            elif kind == packets.TAKEN and descriptor is None:
                if (operation := self._unfinished.pop(packets.read_taken(body), None)) is not None:
                    operation.complete()
            else:
                raise packets.Malformed
        except packets.Malformed:
            self.end(PeerLost("The peer sends what no worker sends."))
