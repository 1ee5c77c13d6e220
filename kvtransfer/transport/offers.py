"""Within a host, blocks are not sent: they are offered where they are, and the receiver copies them."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from kvtransfer.transport.base import Buffer, Operation, Peer
from kvtransfer.transport.local.address import LocalAddress
from kvtransfer.transport.local.offer import Offer
from pdserve.base.shared_memory import ShareableMemory


class IncomingOffer(Protocol):
    """An offer at its receiver, which calls `end` once when it copies nothing more."""

    @property
    def offer(self) -> Offer:
        """What is offered. All of it lies in `memory`."""
        ...

    @property
    def memory(self) -> Buffer:
        """The sender's memory, uint8, read-only. Not to be kept beyond `end`: unmapping it takes long."""
        ...

    def end(self) -> None:
        """The sender may use the blocks again."""
        ...


@runtime_checkable
class LocalTransports(Protocol):
    """A transport that has another way for processes of its host."""

    @property
    def local_address(self) -> LocalAddress | None:
        """Where processes of this host connect to; None: this process shares no memory with them."""
        ...

    @property
    def listens(self) -> bool:
        """Whether others than processes of this host can connect."""
        ...

    async def prepare(self) -> None:
        """Has processes of this host connect, where that is possible or required, and leaves no port open.

        Raises: SetupError, also where `listen` cannot work.
        """
        ...

    def share(self, memory: ShareableMemory) -> None:
        """Blocks of this memory may be offered to processes of this host."""
        ...

    def unshare(self, memory: ShareableMemory) -> None:
        """Blocks of this memory are not offered any more."""
        ...

    def reaches(self, address: LocalAddress) -> bool:
        """Whether a local address can be connected to, as far as it is known."""
        ...

    def is_local(self, peer: Peer) -> bool:
        """Whether the peer was connected to within the host."""
        ...

    async def connect_locally(self, address: LocalAddress, memory: ShareableMemory | None = None) -> Peer:
        """Connects within the host. Raises: PeerLost, also when the other process cannot map `memory`."""
        ...

    def offer(self, peer: Peer, memory: ShareableMemory, offer: Offer) -> Operation:
        """Offers blocks of shared memory to a local peer; done when it reads them no more. Never blocks."""
        ...
