"""A connection from a sender of this host: its memory, and the blocks that it offers there."""

from __future__ import annotations

import hmac
import os
import socket
from collections.abc import Callable
from typing import Protocol

from kvtransfer.transport.base import Buffer
from kvtransfer.transport.local import packets
from kvtransfer.transport.local.offer import Offer
from kvtransfer.transport.local.packet_socket import PacketSocket
from kvtransfer.transport.local.socket_directory import user_of
from pdserve.base.logs import get_logger

log = get_logger(__name__)

#: Memories of one sender: its KV cache, and those of test transfers.
_MAX_MEMORIES = 256


class MapMemory(Protocol):
    """Maps memory of another process to read it."""

    def __call__(self, file: int, num_bytes: int, *, is_on_gpu: bool) -> Buffer:
        """Maps the first bytes behind a descriptor. Raises: OSError, ValueError."""
        ...


class OfferedBlocks:
    """Implements `IncomingOffer`."""

    def __init__(self, offer: Offer, memory: Buffer, on_end: Callable[[int], None]) -> None:
        self.offer = offer
        self._memory: Buffer | None = memory
        self._on_end = on_end

    @property
    def memory(self) -> Buffer:
        """The sender's memory."""
        assert self._memory is not None, "the offer has ended"
        return self._memory

    def end(self) -> None:
        """The sender may use the blocks again."""
        self._memory = None
        self._on_end(self.offer.first_tag)


class IncomingPeer:
    """A sender that has connected to this process."""

    def __init__(
        self,
        accepted: socket.socket,
        token: bytes,
        on_offer: Callable[[OfferedBlocks], None],
        on_end: Callable[[IncomingPeer], None],
        release: Callable[[Callable[[], None]], None],
        map_memory: MapMemory,
    ) -> None:
        """`on_end` is called once, when the connection has ended by itself.

        `release` runs what lets memory go on a thread: unmapping the last view of a dead process's cache takes 150 ms
        per GiB.
        """
        self._token = token
        self._on_offer = on_offer
        self._on_end = on_end
        self._release = release
        self._map_memory = map_memory
        #: Memories that have to be mapped before the sender is welcome; None: it is not known yet.
        self._num_missing: int | None = None
        self._memories: dict[int, Buffer] = {}
        #: Offers that may still be read, and memory that is let go behind the last one.
        self._num_offers = 0
        self._left: list[Buffer] = []
        self._user = user_of(accepted)
        self._socket = PacketSocket(accepted, self._on_packet, self._ended)

    def close(self) -> None:
        """Ends the connection."""
        self._socket.close()
        self._let_go(*self._memories)

    def _ended(self) -> None:
        self._on_end(self)
        self._let_go(*self._memories)

    def _let_go(self, *numbers: int) -> None:
        self._left += [self._memories.pop(number) for number in numbers]
        if self._left and not self._num_offers:
            left, self._left = self._left, []
            self._release(left.clear)

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
        elif kind in (packets.MEMORY, packets.GPU_MEMORY):
            self._map(*packets.read_memory(body), descriptor, is_on_gpu=kind == packets.GPU_MEMORY)
        elif self._num_missing:
            raise packets.Malformed
        elif kind == packets.OFFER:
            self._offered(*packets.read_offer(body))
        elif kind == packets.FORGET:
            number = packets.read_forget(body)
            if number in self._memories:
                self._let_go(number)
        else:
            raise packets.Malformed

    def _map(self, number: int, num_bytes: int, descriptor: int | None, *, is_on_gpu: bool) -> None:
        if descriptor is None:
            raise ValueError("its memory did not arrive: this process may have too many open files")
        if number in self._memories or len(self._memories) >= _MAX_MEMORIES:
            raise ValueError(f"it shows more than {_MAX_MEMORIES} memories, or one twice")
        try:
            self._memories[number] = self._map_memory(descriptor, num_bytes, is_on_gpu=is_on_gpu)
        except (OSError, ValueError) as error:
            self._socket.send(packets.refused(str(error)))
            raise
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
            raise ValueError("it is of another release, or none of ours")
        token, num_memories = packets.read_hello(body)
        if not hmac.compare_digest(token, self._token):
            raise ValueError("it does not know this worker's token")
        return num_memories

    def _offered(self, number: int, offer: Offer) -> None:
        memory = self._memories.get(number)
        if memory is None or int(offer.starts.max()) + offer.block_bytes > len(memory):
            raise packets.Malformed
        self._num_offers += 1
        self._on_offer(OfferedBlocks(offer, memory, self._on_offer_ended))

    def _on_offer_ended(self, tag: int) -> None:
        self._num_offers -= 1
        self._socket.send(packets.taken(tag))
        self._let_go()
