"""The transport of blocks between simulated workers: tagged messages, late, twice, cut short, changed or never.

As a real one does, it either takes a copy of a small message at once, or reads the sender's buffer when the receiver is
ready: a buffer that was given back too early then has other bytes. Workers that share memory offer blocks instead,
which the receiver reads there, also behind the sender's death.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from kvtransfer.transport.base import Buffer, Inbox, Operation, Peer, tag_base_of
from kvtransfer.transport.local.address import LocalAddress
from kvtransfer.transport.local.incoming_peer import OfferedBlocks
from kvtransfer.transport.local.offer import Offer
from kvtransfer.transport.tag_matcher import OpensInboxes, TagMatcher
from pdserve.base.errors import PeerLost, TransferError
from pdserve.base.shared_memory import ShareableMemory
from tests.simulation.loop import Process, current_process
from tests.simulation.network import Network


@dataclass
class WireFaults:
    """What happens to the next messages, between any two workers."""

    #: Kinds of faults to come, the next one last: "drop", "repeat", "truncate", "corrupt", "late".
    planned: list[str] = field(default_factory=list)
    #: How often each happened.
    done: dict[str, int] = field(default_factory=dict)

    def take(self) -> str | None:
        """The fault of the next message."""
        if not self.planned:
            return None
        kind = self.planned.pop()
        self.done[kind] = self.done.get(kind, 0) + 1
        return kind


@dataclass(eq=False)
class _Message:
    tag: int
    num_bytes: int
    #: A copy, or None while it is still in the sender's buffer.
    data: Buffer | None
    send: Operation
    sender: WireTransport


@dataclass(eq=False)
class WirePeer:
    """A connection to one incarnation of a worker."""

    address: bytes
    is_local: bool = False
    closed: bool = False
    unfinished: dict[Operation, None] = field(default_factory=dict)


class WireTransport(OpensInboxes[_Message]):
    """Implements `kvtransfer.transport.Transport` and `LocalTransports` for one simulated worker."""

    name = "inproc"

    def __init__(self, network: Network, faults: WireFaults, directory: dict[bytes, WireTransport]) -> None:
        """`directory`: all transports that listen, by address."""
        process = current_process()
        assert process is not None
        self.process: Process = process
        self._network = network
        self._faults = faults
        self._directory = directory
        self._address = f"wire:{process.name}:".encode() + secrets.token_bytes(8)
        self._matcher = TagMatcher[_Message](self._drop)
        self._peers: dict[WirePeer, None] = {}
        self._inboxes: dict[int, Inbox] = {}
        self._shares = False
        #: The second worker of each tier is on a host of its own.
        self._host = f"host of {process.name}" if process.name.startswith(("p1", "d1")) else "host"
        #: Whether a worker needed the address.
        self.listens = False
        #: Called with the buffer of a receive before it is written.
        self.on_write: Callable[[Buffer], None] = lambda buffer: None

    @property
    def num_expected(self) -> int:
        """Receives that wait for their message, and open inboxes."""
        return self._matcher.num_posted + self._matcher.num_inboxes

    @property
    def local_address(self) -> LocalAddress | None:
        """None: blocks are sent."""
        if not self._shares:
            return None
        return LocalAddress(directory=self._host, name=self._address.hex(), token=bytes(32))

    async def prepare(self) -> None:
        """Workers that share memory connect to it from now on."""
        self._directory[self._address] = self

    def share(self, memory: ShareableMemory) -> None:
        """From now on blocks are offered."""
        self._shares = True

    def unshare(self, memory: ShareableMemory) -> None:
        """Nothing is mapped."""

    def reaches(self, address: LocalAddress) -> bool:
        """Whether both are on one host."""
        return self._shares and address.directory == self._host

    def is_local(self, peer: Peer) -> bool:
        """Whether blocks are offered to it."""
        assert isinstance(peer, WirePeer)
        return peer.is_local

    async def connect_locally(self, address: LocalAddress, memory: ShareableMemory | None = None) -> WirePeer:
        """As `connect`."""
        peer = await self.connect(bytes.fromhex(address.name))
        peer.is_local = True
        return peer

    def expect(self, tag_base: int, inbox: Inbox) -> None:
        """Opens an inbox for messages and offers."""
        super().expect(tag_base, inbox)
        self._inboxes[tag_base] = inbox

    def dismiss(self, tag_base: int) -> None:
        """Closes an inbox."""
        super().dismiss(tag_base)
        self._inboxes.pop(tag_base, None)

    async def listen(self) -> bytes:
        """The address of this incarnation."""
        self.listens = True
        self._directory[self._address] = self
        return self._address

    async def connect(self, address: bytes) -> WirePeer:
        """A dead peer may only show when something is sent."""
        target = self._directory.get(address)
        if target is None or (target.process.is_dead and self._network.chance.random() < 0.5):
            raise PeerLost("Nobody listens at the data address.")
        peer = WirePeer(address)
        self._peers[peer] = None
        return peer

    def disconnect(self, peer: Peer) -> None:
        """Fails the peer's unfinished sends."""
        assert isinstance(peer, WirePeer)
        peer.closed = True
        self._peers.pop(peer, None)
        for send in list(peer.unfinished):
            self._soon(send.fail, PeerLost("The peer was disconnected."))

    def post_receive(self, tag: int, buffer: Buffer, digest: Callable[[Buffer], bytes] | None = None) -> Operation:
        """Receives one message."""
        receive = Operation(tag, buffer, digest)
        early = self._matcher.post(receive)
        if early is not None:
            self._land(early, receive)
        return receive

    def post_send(self, peer: Peer, tag: int, buffer: Buffer) -> Operation:
        """Sends one message, with the fault that is planned for it."""
        assert isinstance(peer, WirePeer)
        send = Operation(tag, buffer)
        target = self._directory.get(peer.address)
        if peer.closed or target is None:
            self._soon(send.fail, PeerLost("The peer is gone."))
            return send
        peer.unfinished[send] = None
        send.add_done_callback(lambda done: peer.unfinished.pop(done, None))
        chance, loop = self._network.chance, self._network.loop
        is_copied = chance.random() < 0.5
        message = _Message(tag, buffer.nbytes, buffer.copy() if is_copied else None, send, self)
        kind = self._faults.take()
        at = self._network.arrival(self.process, target.process)
        if kind == "late":
            at += 40.0 * chance.random()
        if is_copied:
            self._soon(send.complete)
        if kind == "drop":
            if not is_copied:
                self._soon(send.complete)
            return send
        if kind in ("corrupt", "truncate"):
            message.data = _damaged(buffer, kind, chance.randrange(buffer.nbytes))
        loop.call_at(at, target._arrive, message, context=target.process.context)
        if kind == "repeat":
            copy = _Message(tag, buffer.nbytes, buffer.copy(), send, self)
            loop.call_at(at + 3.0 * chance.random(), target._arrive, copy, context=target.process.context)
        return send

    def offer(self, peer: Peer, memory: ShareableMemory, offer: Offer) -> Operation:
        """Offers blocks, with the fault that is planned."""
        assert isinstance(peer, WirePeer)
        operation = Operation(offer.first_tag, memory.bytes)
        target = self._directory.get(peer.address)
        if peer.closed or target is None:
            self._soon(operation.fail, PeerLost("The peer is gone."))
            return operation
        peer.unfinished[operation] = None
        operation.add_done_callback(lambda done: peer.unfinished.pop(done, None))
        chance, loop, kind = self._network.chance, self._network.loop, self._faults.take()
        at = self._network.arrival(self.process, target.process)
        if kind == "late":
            at += 40.0 * chance.random()
        if kind == "drop":  # A socket loses nothing but itself.
            self._soon(self.disconnect, peer)
            return operation
        given, bytes_offered = offer, memory.bytes
        if kind == "truncate":
            given = replace(offer, block_bytes=chance.randrange(1, offer.block_bytes))
        if kind == "corrupt":
            bytes_offered = memory.bytes.copy()
            at_byte = int(offer.starts[0]) + chance.randrange(offer.block_bytes)
            bytes_offered[at_byte] ^= np.uint8(1 << at_byte % 8)
        loop.call_at(at, target._offered, given, bytes_offered, self, operation, context=target.process.context)
        if kind == "repeat":
            at += 3.0 * chance.random()
            loop.call_at(at, target._offered, given, memory.bytes, self, operation, context=target.process.context)
        return operation

    def _offered(self, offer: Offer, memory: Buffer, sender: WireTransport, operation: Operation) -> None:
        def end(tag: int) -> None:
            if not sender.process.is_dead:
                self._network.loop.call_soon(operation.complete, context=sender.process.context)

        blocks = OfferedBlocks(offer, memory, end)
        inbox = self._inboxes.get(tag_base_of(offer.first_tag))
        is_taken = inbox is not None and inbox.offered(blocks)
        self._network.note("wire", self.process.name, f"{offer.num_bytes} offered {is_taken}")
        if not is_taken:
            blocks.end()

    async def cancel(self, receives: Iterable[Operation]) -> None:
        """Withdraws receives."""
        for receive in receives:
            if self._matcher.withdraw(receive):
                receive.mark_cancelled()

    async def close(self) -> None:
        """Fails what is outstanding."""
        self._directory.pop(self._address, None)
        receives, _ = self._matcher.clear()
        for receive in receives:
            receive.fail(PeerLost("The transport was closed."))
        self._matcher.lose(PeerLost("The transport was closed."))
        for peer in list(self._peers):
            self.disconnect(peer)

    def die(self, with_host: bool) -> None:
        """The process is dead. Senders learn it soon, or with its host never."""
        if with_host:
            return
        self._directory.pop(self._address, None)
        for other in list(self._directory.values()):
            if not other.process.is_dead:
                self._network.loop.call_later(0.002, other._lose, self._address, context=other.process.context)

    def _lose(self, address: bytes) -> None:
        for peer in list(self._peers):
            if peer.address == address:
                peer.closed = True
                for send in list(peer.unfinished):
                    send.fail(PeerLost("The peer is gone."))

    def _arrive(self, message: _Message) -> None:
        if message.data is None and (message.send.done or message.sender.process.is_dead):
            return  # The sender gave it up before it was read.
        receive = self._matcher.arrive(message.tag, message)
        self._network.note("wire", self.process.name, f"{message.num_bytes} {receive is not None}")
        if receive is not None:
            self._land(message, receive)

    def _drop(self, message: _Message) -> None:
        """Nobody receives it: it is read nevertheless, so that its sender may go on."""
        if message.data is None and not message.sender.process.is_dead:
            self._network.loop.call_soon(message.send.complete, context=message.sender.process.context)

    def _land(self, message: _Message, receive: Operation) -> None:
        data = message.send.buffer if message.data is None else message.data
        if message.data is None:
            if message.send.done or message.sender.process.is_dead:
                receive.fail(PeerLost("The sender gave the message up."))
                return
            self._network.loop.call_soon(message.send.complete, context=message.sender.process.context)
        self.on_write(receive.buffer)
        if data.nbytes != receive.buffer.nbytes:
            receive.buffer[: min(data.nbytes, receive.buffer.nbytes)] = data[: receive.buffer.nbytes]
            receive.fail(TransferError(f"A message of {data.nbytes} bytes came for {receive.buffer.nbytes}."))
            return
        receive.buffer[:] = data
        receive.complete()

    def _soon(self, call: object, *arguments: object) -> None:
        self._network.loop.call_later(1e-5, call, *arguments, context=self.process.context)  # type: ignore[arg-type]


def _damaged(buffer: Buffer, kind: str, at: int) -> Buffer:
    if kind == "truncate":
        return buffer[:at].copy()
    data = buffer.copy()
    data[at] ^= np.uint8(1 << at % 8)
    return data
