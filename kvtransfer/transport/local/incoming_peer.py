"""A connection from a sender of this host: its memory, and the blocks that it offers there."""

from __future__ import annotations

import asyncio
import hmac
import os
import socket
from collections.abc import Callable
from functools import partial

from kvtransfer.transport.base import Buffer
from kvtransfer.transport.local import packets
from kvtransfer.transport.local.mappings import Mappings
from kvtransfer.transport.local.offer import Offer
from kvtransfer.transport.local.packet_socket import PacketSocket
from kvtransfer.transport.local.socket_directory import user_of
from pdserve.base.logs import get_logger

log = get_logger(__name__)

#: Memories of one sender: its KV cache, and those of test transfers.
_MAX_MEMORIES = 256


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
        mappings: Mappings,
    ) -> None:
        """`on_end` is called once, when the connection has ended by itself."""
        self._token = token
        self._on_offer = on_offer
        self._on_end = on_end
        self._mappings = mappings
        #: Memories that have to be mapped before the sender is welcome; None: it is not known yet.
        self._num_missing: int | None = None
        self._memories: dict[int, Buffer] = {}
        self._is_pinning = False
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
            self._mappings.let_go(left)

    def _on_packet(self, packet: bytes, descriptor: int | None) -> None:
        try:
            self._take(packet[:1], packet[1:], descriptor)
        except (packets.Malformed, OSError, ValueError) as error:
            self._refuse(error)
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def _refuse(self, error: BaseException) -> None:
        log.warning("local_sender_refused", reason=str(error) or "it sends what no worker sends")
        self._socket.close()
        self._ended()

    def _take(self, kind: bytes, body: bytes, descriptor: int | None) -> None:
        if self._num_missing is None:
            self._num_missing = self._require_known(kind, body)
            self._welcome()
        elif kind in (packets.MEMORY, packets.GPU_MEMORY, packets.PINNED_MEMORY):
            self._map(kind, *packets.read_memory(body), descriptor)
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

    def _map(self, kind: bytes, number: int, num_bytes: int, descriptor: int | None) -> None:
        if self._is_pinning or (kind == packets.PINNED_MEMORY and not self._num_missing):
            raise packets.Malformed
        if descriptor is None:
            raise ValueError("its memory did not arrive: this process may have too many open files")
        if number in self._memories or len(self._memories) >= _MAX_MEMORIES:
            raise ValueError(f"it shows more than {_MAX_MEMORIES} memories, or one twice")
        try:
            memory = self._mappings.map(descriptor, num_bytes, is_on_gpu=kind == packets.GPU_MEMORY)
            if kind == packets.PINNED_MEMORY:
                self._mappings.pin(memory).add_done_callback(partial(self._pinned, number))
                self._is_pinning = True
                return
        except (OSError, ValueError) as error:
            self._socket.send(packets.refused(str(error)))
            raise
        self._mapped(number, memory)

    def _pinned(self, number: int, pinning: asyncio.Future[Buffer]) -> None:
        self._is_pinning = False
        error = pinning.exception()
        if error is None:
            self._mapped(number, pinning.result())
        elif not self._socket.is_closed:
            self._socket.send(packets.refused(str(error)))
            self._refuse(error)

    def _mapped(self, number: int, memory: Buffer) -> None:
        self._memories[number] = memory
        if self._socket.is_closed:  # Meanwhile.
            self._let_go(number)
        elif self._num_missing:
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
