"""UCX between hosts, and the local transport within one: a process takes messages from both, for the same receives."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvtransfer.transport.base import Buffer, Inbox, Operation, Peer, TransportGuard
from kvtransfer.transport.local.address import LocalAddress
from kvtransfer.transport.local.outgoing_peer import LocalPeer
from kvtransfer.transport.local.transport import LocalTransport
from kvtransfer.transport.path import LOCAL
from kvtransfer.transport.ucx import UcxTransport
from pdserve.base.errors import SetupError
from pdserve.base.logs import get_logger
from pdserve.base.shared_memory import SharedMemory

log = get_logger(__name__)

#: What `lanes` reports of a local peer.
LOCAL_LANES = (LOCAL,)


class WithLocal:
    """Implements `Transport`, `LaneReporter`, `GuardedTransport` and `LocalTransports`."""

    def __init__(self, remote: UcxTransport, local: LocalTransport) -> None:
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

    def share(self, memory: SharedMemory) -> None:
        """Messages in this memory are sent to processes of this host from where they are."""
        self._local.share(memory)

    def unshare(self, memory: SharedMemory) -> None:
        """From now on messages in this memory are copied before they are sent."""
        self._local.unshare(memory)

    def reaches(self, address: LocalAddress) -> bool:
        """Whether both processes share memory, and the address is in this one's directory."""
        return self._local.has_memory and self._local.reaches(address)

    def is_local(self, peer: Peer) -> bool:
        """Whether the peer was connected to within the host."""
        return isinstance(peer, LocalPeer)

    async def listen(self) -> bytes:
        """The data address of UCX. Local senders can connect, too, where that is possible or required."""
        if not self._has_listened:
            self._has_listened = True  # Once: this is called for each ticket.
            try:
                await self._local.listen()
            except SetupError as error:
                if self._local.is_required:
                    raise
                log.warning("local_sockets_unusable", reason=error)
        return await self._remote.listen()

    async def connect(self, address: bytes) -> Peer:
        """Connects over UCX."""
        return await self._remote.connect(address)

    async def connect_locally(self, address: LocalAddress) -> Peer:
        """Connects within the host. Raises: PeerLost."""
        return await self._local.connect(address.pack())

    def disconnect(self, peer: Peer) -> None:
        """Disconnects."""
        self._of(peer).disconnect(peer)

    def expect(self, tag_base: int, inbox: Inbox) -> None:
        """Opens an inbox for messages from either."""
        self._remote.expect(tag_base, inbox)
        self._local.expect(tag_base, inbox)

    def dismiss(self, tag_base: int) -> None:
        """Closes an inbox."""
        self._remote.dismiss(tag_base)
        self._local.dismiss(tag_base)

    def post_receive(self, tag: int, buffer: Buffer, digest: Callable[[Buffer], bytes] | None = None) -> Operation:
        """Receives a message that has arrived within the host, or one that has come or will come over UCX."""
        transport = self._local if self._local.holds(tag) else self._remote
        return transport.post_receive(tag, buffer, digest)

    def post_send(self, peer: Peer, tag: int, buffer: Buffer) -> Operation:
        """Starts sending."""
        return self._of(peer).post_send(peer, tag, buffer)

    async def cancel(self, receives: Iterable[Operation]) -> None:
        """Withdraws receives from both."""
        receives = list(receives)
        await self._local.cancel(receives)
        await self._remote.cancel(receives)

    async def close(self) -> None:
        """Closes both."""
        await self._remote.close()  # First: what it still receives is its own to end.
        await self._local.close()

    def offered_lanes(self) -> tuple[str, ...]:
        """What UCX can use here."""
        return self._remote.offered_lanes()

    def lanes(self, peer: Peer) -> tuple[str, ...]:
        """What the connection uses."""
        return LOCAL_LANES if isinstance(peer, LocalPeer) else self._remote.lanes(peer)

    def _of(self, peer: Peer) -> UcxTransport | LocalTransport:
        return self._local if isinstance(peer, LocalPeer) else self._remote
