"""A connection from a sender of this host: its memory, and the messages that it offers there."""

from __future__ import annotations

import hmac
import os
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtransfer.transport.base import Buffer
from kvtransfer.transport.local import packets
from kvtransfer.transport.local.packet_socket import PacketSocket
from pdserve.base.logs import get_logger
from pdserve.base.shared_memory import map_to_read

log = get_logger(__name__)

#: Memories of one sender: its blocks, and copies of single messages.
_MAX_MEMORIES = 8192
_CREDENTIALS = struct.Struct("3i")


@dataclass(frozen=True, slots=True)
class OfferedMessage:
    """A message that waits in memory of its sender."""

    sender: IncomingPeer
    tag: int
    buffer: Buffer


class IncomingPeer:
    """A sender that has connected to this process."""

    def __init__(
        self,
        accepted: socket.socket,
        token: bytes,
        on_offers: Callable[[Sequence[OfferedMessage]], None],
        on_end: Callable[[IncomingPeer], None],
    ) -> None:
        """`on_end` is called once, when the connection has ended by itself."""
        self._token = token
        self._on_offers = on_offers
        self._on_end = on_end
        self._is_known = False
        self._memories: dict[int, Buffer] = {}
        self._credentials = accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        self._socket = PacketSocket(accepted, self._on_packet, self._ended)

    @property
    def closed(self) -> bool:
        """Whether the sender has gone, or was refused."""
        return self._socket.is_closed

    def taken(self, tags: Sequence[int]) -> None:
        """The sender may use the memory of these messages again."""
        for packet in packets.taken(tags):
            self._socket.send(packet)

    def close(self) -> None:
        """Ends the connection."""
        self._socket.close()
        self._memories.clear()

    def _ended(self) -> None:
        self._memories.clear()
        self._on_end(self)

    def _on_packet(self, packet: bytes, descriptor: int | None) -> None:
        try:
            self._take(packet[:1], packet[1:], descriptor)
        except (packets.Malformed, OSError, ValueError) as error:
            log.warning("local_sender_refused", reason=str(error) or "it sends what no worker sends")
            self._socket.close()
            self._ended()
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def _take(self, kind: bytes, body: bytes, descriptor: int | None) -> None:
        if not self._is_known:
            self._welcome(kind, body)
        elif kind == packets.OFFER:
            self._on_offers([self._offered(offer) for offer in packets.read_offers(body)])
        elif kind == packets.MEMORY and descriptor is not None:
            number, num_bytes = packets.read_memory(body)
            if len(self._memories) >= _MAX_MEMORIES:
                raise ValueError(f"it shows more than {_MAX_MEMORIES} memories")
            self._memories[number] = map_to_read(descriptor, num_bytes)
        elif kind == packets.FORGET:
            self._memories.pop(packets.read_forget(body), None)
        else:
            raise packets.Malformed

    def _welcome(self, kind: bytes, body: bytes) -> None:
        _, user, _ = _CREDENTIALS.unpack(self._credentials)
        if user not in (os.geteuid(), 0):
            raise ValueError(f"it is a process of user {user}")
        if kind != packets.HELLO or not hmac.compare_digest(body, self._token):
            raise ValueError("it does not know this worker's token")
        self._is_known = True
        self._socket.send(packets.WELCOME)

    def _offered(self, offer: packets.Offer) -> OfferedMessage:
        memory = self._memories.get(offer.memory)
        if memory is None or offer.start + offer.num_bytes > len(memory):
            raise packets.Malformed
        return OfferedMessage(self, offer.tag, memory[offer.start : offer.start + offer.num_bytes])
