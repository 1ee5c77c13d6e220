"""UCX between hosts, and offers within one: a process takes both, for the same transfers."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvtransfer.transport.base import Buffer, Inbox, Operation, Peer, TransportGuard
from kvtransfer.transport.local.address import LocalAddress
from kvtransfer.transport.local.exchange import LocalExchange
from kvtransfer.transport.local.offer import Offer
from kvtransfer.transport.local.outgoing_peer import LocalPeer
from kvtransfer.transport.path import LOCAL, LOCAL_STAGED
from kvtransfer.transport.ucx import UcxTransport
from pdserve.base.errors import SetupError
from pdserve.base.logs import get_logger
from pdserve.base.shared_memory import ShareableMemory

log = get_logger(__name__)


class WithLocal:
    """Implements `Transport`, `LaneReporter`, `GuardedTransport` and `LocalTransports`."""

    def __init__(self, remote: UcxTransport, local: LocalExchange) -> None:
        self._remote = remote
        self._local = local
        self.name = remote.name
        self._has_listened = False

    @property
    def guard(self) -> TransportGuard:
        """The guard of UCX. Local sockets have the rights of their directory."""
        return self._remote.guard

    @property
    def local_address(self) -> LocalAddress | None:
        """Where processes of this host send to; None: this process shares no memory with them."""
        return self._local.address if self._local.has_memory else None

    def share(self, memory: ShareableMemory) -> None:
        """Blocks of this memory may be offered to processes of this host."""
        self._local.share(memory)

    def unshare(self, memory: ShareableMemory) -> None:
        """Blocks of this memory are not offered any more."""
        self._local.unshare(memory)

    def reaches(self, address: LocalAddress) -> bool:
        """Whether both processes share memory, and the address is in this one's directory."""
        return self._local.has_memory and self._local.reaches(address)

    def is_local(self, peer: Peer) -> bool:
        """Whether the peer was connected to within the host."""
        return isinstance(peer, LocalPeer)

    @property
    def listens(self) -> bool:
        """Whether UCX listens."""
        return self._remote.listens

    async def prepare(self) -> None:
        """Local senders can connect, where that is possible or required. UCX listens for a moment, to see that it can.

        To be called before anything else. Raises: SetupError.
        """
        self._listen_locally()
        await self._remote.listen()
        await self._remote.close()

    async def listen(self) -> bytes:
        """The data address of UCX. Local senders can connect, too."""
        self._listen_locally()
        try:
            return await self._remote.listen()
        except SetupError as error:
            log.error("data_address_not_opened", reason=error)
            raise

    def _listen_locally(self) -> None:
        if self._has_listened:
            return  # Once: an address is needed for each ticket.
        self._has_listened = True
        try:
            self._local.listen()
        except SetupError as error:
            if self._local.is_required:
                raise
            log.warning("local_sockets_unusable", reason=error)

    async def connect(self, address: bytes) -> Peer:
        """Connects over UCX."""
        return await self._remote.connect(address)

    async def connect_locally(self, address: LocalAddress, memory: ShareableMemory | None = None) -> Peer:
        """Connects within the host. Raises: PeerLost, also when the other process cannot map `memory`."""
        return await self._local.connect(address, memory)

    def disconnect(self, peer: Peer) -> None:
        """Disconnects."""
        (self._local if isinstance(peer, LocalPeer) else self._remote).disconnect(peer)

    def expect(self, tag_base: int, inbox: Inbox) -> None:
        """Opens an inbox for messages from either."""
        self._remote.expect(tag_base, inbox)
        self._local.expect(tag_base, inbox)

    def dismiss(self, tag_base: int) -> None:
        """Closes an inbox."""
        self._remote.dismiss(tag_base)
        self._local.dismiss(tag_base)

    def post_receive(self, tag: int, buffer: Buffer, digest: Callable[[Buffer], bytes] | None = None) -> Operation:
        """Receives a message over UCX."""
        return self._remote.post_receive(tag, buffer, digest)

    def post_send(self, peer: Peer, tag: int, buffer: Buffer) -> Operation:
        """Sends over UCX."""
        return self._remote.post_send(peer, tag, buffer)

    def offer(self, peer: Peer, memory: ShareableMemory, offer: Offer) -> Operation:
        """Offers blocks within the host."""
        return self._local.offer(peer, memory, offer)

    async def cancel(self, receives: Iterable[Operation]) -> None:
        """Withdraws receives."""
        await self._remote.cancel(receives)

    async def close(self) -> None:
        """Closes both."""
        await self._remote.close()
        await self._local.close()

    def offered_lanes(self) -> tuple[str, ...]:
        """What UCX can use here."""
        return self._remote.offered_lanes()

    def lanes(self, peer: Peer) -> tuple[str, ...]:
        """What the connection uses."""
        if isinstance(peer, LocalPeer):
            return (LOCAL_STAGED if peer.is_staged else LOCAL,)
        return self._remote.lanes(peer)

    def protocol(self, peer: Peer, *, device_memory: bool) -> str:
        """How UCX sends large messages."""
        return "" if isinstance(peer, LocalPeer) else self._remote.protocol(peer, device_memory=device_memory)
