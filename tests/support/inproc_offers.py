"""Offers between workers of one process: the inproc transport, with the way that workers of one host have beside it."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from kvtransfer.transport.base import Buffer, Inbox, Operation, Peer, tag_base_of
from kvtransfer.transport.inproc import InprocTransport
from kvtransfer.transport.local.address import LocalAddress
from kvtransfer.transport.local.incoming_peer import OfferedBlocks
from kvtransfer.transport.local.offer import Offer
from pdserve.base.errors import PeerLost
from pdserve.base.shared_memory import ShareableMemory

_LISTENING: weakref.WeakValueDictionary[str, InprocWithOffers] = weakref.WeakValueDictionary()


class LocalPeer:
    """A connection to a transport of this process."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.closed = False
        self.unfinished: dict[int, Operation] = {}

    def end(self) -> None:
        """Fails what is offered; it may still be copied."""
        self.closed = True
        unfinished, self.unfinished = self.unfinished, {}
        for operation in unfinished.values():
            operation.fail(PeerLost("The peer was disconnected."))


class InprocWithOffers(InprocTransport):
    """Implements `LocalTransports`, too."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._inboxes: dict[int, Inbox] = {}
        self.local_address = LocalAddress(directory="inproc", name=name, token=bytes(32))
        self.offers: list[Offer] = []
        #: How this end reads another one's memory.
        self.mapped: Callable[[ShareableMemory], Buffer] = lambda memory: memory.bytes
        _LISTENING[name] = self

    @property
    def listens(self) -> bool:
        return True

    async def prepare(self) -> None:
        """Nothing is missing."""

    def share(self, memory: ShareableMemory) -> None:
        """Everybody here sees all memory."""

    def unshare(self, memory: ShareableMemory) -> None:
        """Nothing is mapped."""

    def reaches(self, address: LocalAddress) -> bool:
        return True

    def is_local(self, peer: Peer) -> bool:
        return isinstance(peer, LocalPeer)

    async def connect_locally(self, address: LocalAddress, memory: ShareableMemory | None = None) -> LocalPeer:
        if address.name not in _LISTENING:
            raise PeerLost("Nobody listens there.")
        return LocalPeer(address.name)

    def disconnect(self, peer: Peer) -> None:
        if isinstance(peer, LocalPeer):
            peer.end()
        else:
            super().disconnect(peer)

    def expect(self, tag_base: int, inbox: Inbox) -> None:
        super().expect(tag_base, inbox)
        self._inboxes[tag_base] = inbox

    def dismiss(self, tag_base: int) -> None:
        super().dismiss(tag_base)
        self._inboxes.pop(tag_base, None)

    def offer(self, peer: Peer, memory: ShareableMemory, offer: Offer) -> Operation:
        assert isinstance(peer, LocalPeer)
        self.offers.append(offer)
        operation = peer.unfinished[offer.first_tag] = Operation(offer.first_tag, memory.bytes)
        receiver = _LISTENING[peer.name]
        blocks = OfferedBlocks(offer, receiver.mapped(memory), lambda tag: end(peer, tag))
        inbox = receiver._inboxes.get(tag_base_of(offer.first_tag))
        if inbox is None or not inbox.offered(blocks):
            blocks.end()
        return operation


def end(peer: LocalPeer, tag: int) -> None:
    """The offer is read no more."""
    if (operation := peer.unfinished.pop(tag, None)) is not None:
        operation.complete()
