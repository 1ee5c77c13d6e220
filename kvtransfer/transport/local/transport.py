"""The transport between processes of one host, whose receiver pulls."""

from __future__ import annotations

import asyncio
import socket
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from kvtransfer.transport.base import Buffer, Operation, Peer
from kvtransfer.transport.local.address import LocalAddress
from kvtransfer.transport.local.incoming_peer import IncomingPeer, OfferedMessage
from kvtransfer.transport.local.outgoing_peer import LocalPeer
from kvtransfer.transport.local.socket_directory import SocketDirectory
from kvtransfer.transport.tag_matcher import OpensInboxes, TagMatcher
from pdserve.base.errors import PdserveError, PeerLost, SetupError, TransferError
from pdserve.base.logs import get_logger
from pdserve.base.shared_memory import SharedMemory

#: Bytes that are copied before the event loop hears of it, and their sender.
_REPORTED_BYTES = 4 << 20
#: A peer that does not answer to a connection for so long is lost.
_WELCOME_S = 2.0

#: Pause after there was no descriptor for a sender.
_NO_FILE_S = 0.5

_Match = tuple[OfferedMessage, Operation]
#: Without the message, whose memory the thread lets go.
_Copied = tuple[IncomingPeer, Operation, PdserveError | None]
log = get_logger(__name__)


class LocalTransport(OpensInboxes[OfferedMessage]):
    """Implements `Transport`. Messages in memory that was `share`d are copied once, by a thread of the receiver."""

    name = "local"

    def __init__(self, directory: SocketDirectory) -> None:
        """`directory`: where the sockets of this user's processes are."""
        self._directory = directory
        self._listener: socket.socket | None = None
        self._address: LocalAddress | None = None
        self._memories: list[SharedMemory] = []
        self._peers: set[LocalPeer] = set()
        self._senders: set[IncomingPeer] = set()
        self._matcher = TagMatcher[OfferedMessage](self._drop)
        self._copying: set[Operation] = set()
        self._is_closed = False
        self._copies = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-copies")
        #: Lets memory go that senders have left, which takes long.
        self._unmaps = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-unmaps")
        self._loop = asyncio.get_running_loop()

    def share(self, memory: SharedMemory) -> None:
        """Messages in this memory are sent from where they are."""
        self._memories.append(memory)

    def unshare(self, memory: SharedMemory) -> None:
        """Messages in this memory are copied before they are sent, and connected peers unmap it."""
        self._memories.remove(memory)
        for peer in self._peers:
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
        """Where this process takes messages; None: it does not listen."""
        return self._address

    async def listen(self) -> bytes:
        """The packed address. Only the first call has something to do. Raises: SetupError."""
        if self._address is None:
            try:
                self._copies.submit(int)  # A process that cannot have the thread finds out now.
            except RuntimeError as error:
                raise SetupError(f"No thread can be started that copies blocks: {error}.") from error
            self._listener, self._address = self._directory.listen()
            self._loop.add_reader(self._listener, self._accept)
        return self._address.pack()

    def reaches(self, address: LocalAddress) -> bool:
        """Whether the address is in this process's directory."""
        return address.directory == self._directory.identity

    async def connect(self, address: bytes) -> LocalPeer:
        """Connects to a process of this user."""
        target = LocalAddress.unpack(address)
        peer = LocalPeer(self._directory.connect(target), target.token, self._memories, self._peers.discard)
        if not peer.closed:
            self._peers.add(peer)
        try:
            async with asyncio.timeout(_WELCOME_S):
                await asyncio.shield(peer.welcome)
        except TimeoutError:
            peer.end(PeerLost(f"The peer at its local socket does not answer for {_WELCOME_S:.0f} s."))
            await peer.welcome
        except BaseException:
            peer.end(PeerLost("The connection was given up."))
            raise
        return peer

    def disconnect(self, peer: Peer) -> None:
        """Fails the peer's unfinished sends at once: the receiver's digests refuse what it copies later."""
        _own(peer).end(PeerLost("The peer was disconnected."))

    def holds(self, tag: int) -> bool:
        """Whether a message of this tag waits for the receive of an inbox."""
        return self._matcher.holds(tag)

    def post_receive(self, tag: int, buffer: Buffer, digest: Callable[[Buffer], bytes] | None = None) -> Operation:
        """Receives one message."""
        receive = Operation(tag, buffer, digest)
        early = self._matcher.post(receive)
        if early is not None:
            self._take([(early, receive)])
        return receive

    def post_send(self, peer: Peer, tag: int, buffer: Buffer) -> Operation:
        """Offers a message."""
        send = Operation(tag, buffer)
        _own(peer).send(send, self._memories)
        return send

    async def cancel(self, receives: Iterable[Operation]) -> None:
        """Withdraws waiting receives, and waits for copies."""
        receives = list(receives)
        for receive in receives:
            if self._matcher.withdraw(receive):
                receive.mark_cancelled()
        for receive in receives:
            if receive in self._copying:
                await receive.ended()

    async def close(self) -> None:
        """Ends all connections, and waits for copies."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._listener is not None:
            self._loop.remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        if self._address is not None:
            self._directory.remove(self._address)
            self._address = None
        receives, messages = self._matcher.clear()
        for receive in receives:
            receive.fail(PeerLost("The transport was closed."))
        messages.clear()
        self._matcher.lose(PeerLost("The transport was closed."))
        for peer in list(self._peers):
            peer.end(PeerLost("The transport was closed."))
        for sender in self._senders:
            sender.close()
        self._senders.clear()
        for threads in (self._copies, self._unmaps):
            await self._loop.run_in_executor(threads, int)  # Behind all that they have to do.
            threads.shutdown()

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
        sender = IncomingPeer(accepted, self._address.token, self._on_offers, self._on_end, self._release)
        self._senders.add(sender)

    def _release(self, let_go: Callable[[], None]) -> None:
        """Runs it behind the copies that are under way, and beside later ones."""
        self._copies.submit(self._unmaps.submit, let_go)

    def _accept_again(self) -> None:
        if self._listener is not None:
            self._loop.add_reader(self._listener, self._accept)

    def _on_end(self, sender: IncomingPeer) -> None:
        self._senders.discard(sender)
        self._matcher.drop_early(lambda message: message.sender is sender)

    def _on_offers(self, messages: Sequence[OfferedMessage]) -> None:
        matches = []
        for message in messages:
            if message.sender.closed:  # Its socket failed when a drop was acknowledged.
                break
            receive = self._matcher.arrive(message.tag, message)
            if receive is not None:
                matches.append((message, receive))
        self._take(matches)

    def _take(self, matches: Sequence[_Match]) -> None:
        """Copies messages to their receives, on the thread."""
        fitting: list[_Match] = []
        for message, receive in matches:
            if message.sender.closed:
                receive.fail(PeerLost("The sender has ended."))
            elif message.buffer.nbytes != receive.buffer.nbytes:
                self._drop(message)
                sizes = f"{message.buffer.nbytes} bytes came for a receive of {receive.buffer.nbytes}"
                receive.fail(TransferError(f"A message of {sizes}."))
            else:
                fitting.append((message, receive))
                self._copying.add(receive)
        if fitting:
            self._copies.submit(self._copy, fitting)

    def _copy(self, matches: Sequence[_Match]) -> None:
        """On the thread. Reports in between, so that senders go on."""
        copied: list[_Copied] = []
        copied_bytes = 0
        for message, receive in matches:
            error: PdserveError | None = None
            try:
                np.copyto(receive.buffer, message.buffer)
                receive.find_digest()  # While the bytes are in the processor's cache.
            except Exception as found:  # noqa: BLE001 - whatever it is, the receive has to end
                log.error("message_not_copied", exc=found)
                error = TransferError(f"A message could not be copied: {type(found).__name__}.")
            copied.append((message.sender, receive, error))
            copied_bytes += receive.buffer.nbytes
            if copied_bytes >= _REPORTED_BYTES:
                self._loop.call_soon_threadsafe(self._copied, copied)
                copied, copied_bytes = [], 0
        if copied:
            self._loop.call_soon_threadsafe(self._copied, copied)

    def _copied(self, copied: Sequence[_Copied]) -> None:
        tags: dict[IncomingPeer, list[int]] = defaultdict(list)
        for sender, receive, error in copied:
            tags[sender].append(receive.tag)
            self._copying.discard(receive)
            if error is None:
                receive.complete()
            else:
                receive.fail(error)
        for sender, taken in tags.items():
            sender.taken(taken)

    def _drop(self, message: OfferedMessage) -> None:
        message.sender.taken([message.tag])


def _own(peer: Peer) -> LocalPeer:
    assert isinstance(peer, LocalPeer), "a peer is used with the transport that connected it"
    return peer
