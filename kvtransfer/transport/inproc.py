"""Messages within one process, copied in memory: for tests of everything above a transport."""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kvtransfer.transport.base import Buffer, Operation, Peer
from kvtransfer.transport.tag_matcher import OpensInboxes, TagMatcher
from pdserve.base.errors import PeerLost, TransferError

#: Transports of this process that listen. Weak: a transport dropped without `close` is a peer that died.
_LISTENING: weakref.WeakValueDictionary[bytes, InprocTransport] = weakref.WeakValueDictionary()


@dataclass(eq=False, slots=True)
class InprocPeer:
    """A listening transport of this process."""

    address: bytes
    closed: bool = False
    unfinished: set[Operation] = field(default_factory=set)


class InprocTransport(OpensInboxes[Operation]):
    """`Transport` within one process and event loop."""

    name = "inproc"

    def __init__(self) -> None:
        self._address = b"inproc:" + secrets.token_bytes(16)
        self._matcher = TagMatcher[Operation](Operation.complete)
        self._peers: set[InprocPeer] = set()

    async def listen(self) -> bytes:
        """The data address. From now on peers can connect."""
        _LISTENING[self._address] = self
        return self._address

    async def connect(self, address: bytes) -> InprocPeer:
        """Connects to a listening transport of this process."""
        if address not in _LISTENING:
            raise PeerLost("No transport of this process listens at the data address.")
        peer = InprocPeer(address=address)
        self._peers.add(peer)
        return peer

    def disconnect(self, peer: Peer) -> None:
        """Fails the peer's unfinished sends."""
        self._lose(_own(peer))

    def post_receive(self, tag: int, buffer: Buffer, digest: Callable[[Buffer], bytes] | None = None) -> Operation:
        """Receives one message."""
        receive = Operation(tag, buffer, digest)
        early = self._matcher.post(receive)
        if early is not None:
            _copy(early, receive)
        return receive

    def post_send(self, peer: Peer, tag: int, buffer: Buffer) -> Operation:
        """Copies into the posted buffer, or waits until it is posted."""
        send = Operation(tag, buffer)
        own = _own(peer)
        target = _LISTENING.get(own.address)
        if own.closed or target is None:
            send.fail(PeerLost("The peer was disconnected or has closed its transport."))
            return send
        own.unfinished.add(send)
        send.add_done_callback(own.unfinished.discard)
        target._arrive(send)
        return send

    async def cancel(self, receives: Iterable[Operation]) -> None:
        """Withdraws waiting receives; copies are instantaneous."""
        for receive in receives:
            if self._matcher.withdraw(receive):
                receive.mark_cancelled()

    async def close(self) -> None:
        """Stops listening."""
        _LISTENING.pop(self._address, None)
        receives, sends = self._matcher.clear()
        for operation in (*receives, *sends):
            operation.fail(PeerLost("The transport was closed."))
        self._matcher.lose(PeerLost("The transport was closed."))
        for peer in list(self._peers):
            self._lose(peer)

    def _lose(self, peer: InprocPeer) -> None:
        peer.closed = True
        self._peers.discard(peer)
        for send in list(peer.unfinished):
            send.fail(PeerLost("The peer was disconnected."))

    def _arrive(self, send: Operation) -> None:
        receive = self._matcher.arrive(send.tag, send)
        if receive is not None:
            _copy(send, receive)


def _own(peer: Peer) -> InprocPeer:
    assert isinstance(peer, InprocPeer), "a peer is used with the transport that connected it"
    return peer


def _copy(send: Operation, receive: Operation) -> None:
    if send.done:  # The sender gave up while its message waited.
        receive.fail(PeerLost("The sender gave the message up."))
        return
    if send.buffer.nbytes != receive.buffer.nbytes:
        receive.fail(
            TransferError(f"A message of {send.buffer.nbytes} bytes came for a receive of {receive.buffer.nbytes}.")
        )
    else:
        receive.buffer[:] = send.buffer
        receive.complete()
    send.complete()
