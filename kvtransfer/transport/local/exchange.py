"""What this process offers to others of its host, and what they offer to it."""

from __future__ import annotations

import asyncio
import socket

from kvtransfer.transport.base import Inbox, Operation, Peer, tag_base_of
from kvtransfer.transport.local.address import LocalAddress
from kvtransfer.transport.local.incoming_peer import IncomingPeer, OfferedBlocks
from kvtransfer.transport.local.mappings import Mappings
from kvtransfer.transport.local.offer import Offer
from kvtransfer.transport.local.outgoing_peer import LocalPeer
from kvtransfer.transport.local.socket_directory import SocketDirectory
from pdserve.base.errors import PeerLost
from pdserve.base.logs import get_logger
from pdserve.base.shared_memory import ShareableMemory

#: A peer that does not answer to a connection for so long is lost.
_WELCOME_S = 2.0
#: The same if it has to pin memory first, perhaps behind that of others.
_PINNED_S = 10.0

#: Pause after there was no descriptor for a sender.
_NO_FILE_S = 0.5

log = get_logger(__name__)


class LocalExchange:
    """The connections of one process. Belongs to the event loop."""

    def __init__(self, directory: SocketDirectory, gpu: int | None = None) -> None:
        """`directory`: where the sockets of this user's processes are. `gpu`: the device that reads others' memory."""
        self._directory = directory
        self._listener: socket.socket | None = None
        self._address: LocalAddress | None = None
        self._memories: list[ShareableMemory] = []
        self._peers: set[LocalPeer] = set()
        self._senders: set[IncomingPeer] = set()
        self._inboxes: dict[int, Inbox] = {}
        self._is_closed = False
        self._mappings = Mappings(gpu)
        self._loop = asyncio.get_running_loop()

    def share(self, memory: ShareableMemory) -> None:
        """Blocks of this memory may be offered."""
        self._memories.append(memory)

    def unshare(self, memory: ShareableMemory) -> None:
        """Connected peers unmap this memory."""
        self._memories.remove(memory)
        for peer in list(self._peers):  # One that has ended leaves meanwhile.
            peer.forget(memory)

    @property
    def is_required(self) -> bool:
        """Whether a process that cannot listen does not start."""
        return self._directory.is_required

    @property
    def has_memory(self) -> bool:
        """Whether this process shares memory."""
        return bool(self._memories)

    @property
    def address(self) -> LocalAddress | None:
        """Where this process takes offers; None: it does not listen."""
        return self._address

    def listen(self) -> LocalAddress:
        """From now on processes can connect. Only the first call has something to do. Raises: SetupError."""
        if self._address is None:
            self._mappings.start()
            self._listener, self._address = self._directory.listen()
            self._loop.add_reader(self._listener, self._accept)
        return self._address

    def reaches(self, address: LocalAddress) -> bool:
        """Whether the address is in this process's directory."""
        return address.directory == self._directory.identity

    async def connect(self, target: LocalAddress, memory: ShareableMemory | None = None) -> LocalPeer:
        """Connects to a process of this user, which maps `memory` first; other memory is shown when it is offered.

        Raises: PeerLost.
        """
        shown = [] if memory is None else [memory]
        peer = LocalPeer(self._directory.connect(target), target.token, shown, self._peers.discard)
        if not peer.closed:
            self._peers.add(peer)
        limit_s = _PINNED_S if peer.is_staged else _WELCOME_S
        try:
            async with asyncio.timeout(limit_s):
                await asyncio.shield(peer.welcome)
        except TimeoutError:
            peer.end(PeerLost(f"The peer at its local socket does not answer for {limit_s:.0f} s."))
            await peer.welcome
        except BaseException:
            peer.end(PeerLost("The connection was given up."))
            raise
        return peer

    def disconnect(self, peer: Peer) -> None:
        """Fails the peer's unfinished offers at once: the receiver's digests refuse what it copies later."""
        _own(peer).end(PeerLost("The peer was disconnected."))

    def expect(self, tag_base: int, inbox: Inbox) -> None:
        """Opens an inbox, which takes offers."""
        self._inboxes[tag_base] = inbox

    def dismiss(self, tag_base: int) -> None:
        """Closes an inbox. Offers to it end at once from now on."""
        self._inboxes.pop(tag_base, None)

    def offer(self, peer: Peer, memory: ShareableMemory, offer: Offer) -> Operation:
        """Offers blocks of memory that was shared."""
        return _own(peer).offer(memory, offer)

    async def close(self) -> None:
        """Ends all connections. Receivers have closed their inboxes, and ended their copies, before."""
        if self._is_closed:
            return
        self._inboxes.clear()
        if self._listener is not None:
            self._loop.remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        if self._address is not None:
            self._directory.remove(self._address)
            self._address = None
        for peer in list(self._peers):
            peer.end(PeerLost("The transport was closed."))
        for sender in self._senders:
            sender.close()
        self._senders.clear()
        self._is_closed = True
        await self._mappings.close()

    def _accept(self) -> None:
        assert self._listener is not None
        assert self._address is not None
        try:
            accepted, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError, InterruptedError):  # It has gone again.
            return
        except OSError as error:  # No descriptor: this would be called again and again.
            log.warning("local_sender_not_accepted", reason=error)
            self._loop.remove_reader(self._listener)
            self._loop.call_later(_NO_FILE_S, self._accept_again)
            return
        accepted.setblocking(False)
        sender = IncomingPeer(
            accepted,
            self._address.token,
            self._on_offer,
            on_end=self._senders.discard,
            mappings=self._mappings,
        )
        self._senders.add(sender)

    def _accept_again(self) -> None:
        if self._listener is not None:
            self._loop.add_reader(self._listener, self._accept)

    def _on_offer(self, blocks: OfferedBlocks) -> None:
        inbox = self._inboxes.get(tag_base_of(blocks.offer.first_tag))
        if inbox is None or not inbox.offered(blocks):
            blocks.end()


def _own(peer: Peer) -> LocalPeer:
    assert isinstance(peer, LocalPeer), "a peer is used with the transport that connected it"
    return peer
