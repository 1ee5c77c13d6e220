"""A connection from a sender of this host: its memory, and the messages that it offers there."""

from __future__ import annotations

import hmac
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtransfer.transport.base import Buffer
from kvtransfer.transport.local import packets
from kvtransfer.transport.local.packet_socket import PacketSocket
from kvtransfer.transport.local.socket_directory import user_of
from pdserve.base.logs import get_logger
from pdserve.base.shared_memory import map_to_read

log = get_logger(__name__)

#: Memories of one sender: its blocks, and copies of single messages.
_MAX_MEMORIES = 8192


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
        release: Callable[[Callable[[], None]], object],
    ) -> None:
        """`on_end` is called once, when the connection has ended by itself.

        `release` runs what lets memory go on a thread, behind the copies: unmapping the last view of a dead process's
        cache takes 150 ms per GiB.
        """
        self._token = token
        self._on_offers = on_offers
        self._on_end = on_end
        self._release = release
        #: Memories that have to be mapped before the sender is welcome; None: it is not known yet.
        self._num_missing: int | None = None
        self._memories: dict[int, Buffer] = {}
        self._user = user_of(accepted)
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
        self._let_go()

    def _ended(self) -> None:
        self._on_end(self)
        self._let_go()

    def _let_go(self) -> None:
        memories, self._memories = self._memories, {}
        if memories:
            self._release(memories.clear)

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
        if self._num_missing is None:
            self._num_missing = self._require_known(kind, body)
            self._welcome()
        elif kind == packets.MEMORY:
            self._map(*packets.read_memory(body), descriptor)
        elif self._num_missing:
            raise packets.Malformed
        elif kind == packets.OFFER:
            self._on_offers([self._offered(offer) for offer in packets.read_offers(body)])
        elif kind == packets.FORGET:
            self._memories.pop(packets.read_forget(body), None)
        else:
            raise packets.Malformed

    def _map(self, number: int, num_bytes: int, descriptor: int | None) -> None:
        if descriptor is None:
            raise ValueError("its memory did not arrive: this process may have too many open files")
        if len(self._memories) >= _MAX_MEMORIES:
            raise ValueError(f"it shows more than {_MAX_MEMORIES} memories")
        self._memories[number] = map_to_read(descriptor, num_bytes)
        if self._num_missing:
            self._num_missing -= 1
            self._welcome()

    def _welcome(self) -> None:
        if self._num_missing == 0:
            self._socket.send(packets.WELCOME)

    def _require_known(self, kind: bytes, body: bytes) -> int:
        """Refuses strangers. Returns how many memories follow."""
        if self._user not in (os.geteuid(), 0):
            raise ValueError(f"it is a process of user {self._user}")
        if kind != packets.HELLO:
            raise packets.Malformed
        token, num_memories = packets.read_hello(body)
        if not hmac.compare_digest(token, self._token):
            raise ValueError("it does not know this worker's token")
        return num_memories

    def _offered(self, offer: packets.Offer) -> OfferedMessage:
        memory = self._memories.get(offer.memory)
        if memory is None or offer.start + offer.num_bytes > len(memory):
            raise packets.Malformed
        return OfferedMessage(self, offer.tag, memory[offer.start : offer.start + offer.num_bytes])
