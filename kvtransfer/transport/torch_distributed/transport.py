"""torch.distributed point-to-point: one two-rank process group per connected pair, so that peers can come and go.

A plain TCP connection per pair carries the rendezvous and announces each message (tag and size); the group carries
only payloads, in the order announced. So 64-bit tags need no room in gloo's 32 bits or NCCL's none, and nothing waits
inside torch but transfers that are really happening. What carries payloads are `PairLinks`: gloo's for buffers in host
memory, NCCL's for those in a GPU's.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch._C._distributed_c10d import TCPStore

from kvtransfer.transport.base import Buffer, Operation, Peer
from kvtransfer.transport.tag_matcher import TagMatcher
from kvtransfer.transport.torch_distributed.address import DataAddress
from kvtransfer.transport.torch_distributed.pair_link import (
    CONNECTOR_RANK,
    LISTENER_RANK,
    PairLink,
    PairLinks,
    Rendezvous,
)
from pdserve.base.errors import PeerLost, SetupError, TransferError
from pdserve.base.logs import get_logger

log = get_logger(__name__)

#: The listener's greeting: number of the pair. The connector's announcements: tag and bytes of the next payload.
_GREETING = struct.Struct("<Q")
_ANNOUNCEMENT = struct.Struct("<QQ")


@dataclass(eq=False, slots=True)
class _Arrival:
    """A message on its way in: into its receive's buffer, or beside it when that is not posted or does not fit."""

    num_bytes: int
    receive: Operation | None = None
    #: Nobody will look at it.
    dropped: bool = False
    #: Where it is, when it has landed.
    data: Buffer | None = None
    error: PeerLost | None = None

    @property
    def landed(self) -> bool:
        return self.data is not None or self.error is not None

    def drop(self) -> None:
        self.dropped = True


@dataclass(eq=False, slots=True)
class _Pair:
    """The way to one other process, or from it."""

    control: asyncio.Transport
    link: PairLink
    lost: bool = False
    formed: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    arrivals: set[_Arrival] = field(default_factory=set)

    @property
    def closed(self) -> bool:
        return self.lost

    def report_formed(self, error: PeerLost | None) -> None:
        """The rendezvous is over."""
        if error is None:
            self.formed.set_result(None)
        else:
            self.formed.set_exception(error)
            self.formed.exception()  # The listener's side has nobody to tell.

    def break_off(self) -> Future[None]:
        """Ends what is under way; done when it is over.

        The other process sees the control connection end, and does the same.
        """
        self.lost = True
        self.control.abort()
        return self.link.break_off()


class TorchDistributedTransport:
    """`Transport` over torch.distributed. `host` is the address at which peers reach this process.

    `drain_timeout_s` bounds how long `cancel` waits for a message that is landing; then its pair is broken off.
    """

    name = "nccl"

    def __init__(self, links: PairLinks, *, host: str = "127.0.0.1", drain_timeout_s: float = 5.0) -> None:
        self._links = links
        self._host = host
        self._drain_timeout_s = drain_timeout_s
        self._matcher: TagMatcher[_Arrival] = TagMatcher(
            _Arrival.drop, max_early=links.max_early, max_early_bytes=links.max_unmatched_bytes
        )
        self._pairs: set[_Pair] = set()
        #: Broken off, and not yet over.
        self._ending: dict[_Pair, Future[None]] = {}
        self._closed = False
        self._next_pair = 0
        self._server: asyncio.Server | None = None
        self._store: TCPStore | None = None

    async def listen(self) -> bytes:
        """Host, GPU, control port and store port; the ports are opened by the first call."""
        if self._server is None:
            try:
                loop = asyncio.get_running_loop()
                self._server = await loop.create_server(lambda: _ListenerControl(self), self._host, 0)
                self._store = TCPStore(self._host, 0, is_master=True, wait_for_workers=False)
            except OSError as error:
                raise SetupError(f"cannot listen on {self._host}: {error}") from error
        assert self._store is not None
        port = self._server.sockets[0].getsockname()[1]
        return DataAddress(self._host, self._links.gpu, port, self._store.port).pack()

    async def connect(self, address: bytes) -> _Pair:
        """Forms a group with the listener.

        Raises: PeerLost, also where NCCL does not connect the two.
        """
        there = DataAddress.unpack(address)
        there.require_reachable_from(self._links.gpu)
        try:
            control, protocol = await asyncio.get_running_loop().create_connection(
                _ConnectorControl, there.host, there.control_port
            )
        except OSError as error:
            raise PeerLost(f"cannot connect to {there.host}:{there.control_port}: {error}") from error
        if self._closed:
            control.abort()
            raise _closed()
        pair = _Pair(control, self._links.open("nccl-send"))
        protocol.on_lost = lambda: self._lose(pair)
        self._pairs.add(pair)
        try:
            async with asyncio.timeout(self._links.connect_timeout_s):
                number = await protocol.greeting
                self._form(pair, there.host, there.store_port, number, CONNECTOR_RANK)
                await asyncio.shield(pair.formed)
        except TimeoutError as error:
            self._lose(pair)
            raise PeerLost(f"{there.host} did not answer within {self._links.connect_timeout_s:.0f} s") from error
        except BaseException:
            self._lose(pair)
            raise
        return pair

    def disconnect(self, peer: Peer) -> None:
        """Breaks the group; sends fail as soon as the thread has noticed."""
        self._lose(_own(peer))

    def post_receive(self, tag: int, buffer: Buffer) -> Operation:
        """Waits for the announcement of that tag, or takes what came early."""
        receive = Operation(tag, buffer)
        early = self._matcher.post(receive)
        if early is not None:
            early.receive = receive
            if early.landed:
                self._deliver(early)
        return receive

    def post_send(self, peer: Peer, tag: int, buffer: Buffer) -> Operation:
        """Announces the message and queues its payload."""
        send = Operation(tag, buffer)
        pair = _own(peer)
        if pair.lost:
            send.fail(PeerLost("the peer was disconnected"))
            return send
        pair.control.write(_ANNOUNCEMENT.pack(tag, buffer.nbytes))
        self._then(pair, pair.link.send(buffer), partial(_finish, send))
        return send

    async def cancel(self, receives: Iterable[Operation]) -> None:
        """Withdraws what was not announced; waits for what is landing, and breaks its pair when that takes too long."""
        landing = set()
        for receive in receives:
            if self._matcher.withdraw(receive):
                receive.mark_cancelled()
            elif not receive.done:
                landing.add(receive)
        settled = [_settled(receive) for receive in landing]
        try:
            async with asyncio.timeout(self._drain_timeout_s):
                for event in settled:
                    await event.wait()
        except TimeoutError:
            for pair in [p for p in self._pairs if any(a.receive in landing for a in p.arrivals)]:
                log.warning("nccl_pair_broken", reason="a message that was landing did not finish")
                self._lose(pair)
            for event in settled:
                await event.wait()

    async def close(self) -> None:
        """Breaks every group and closes the ports. What torch does not give back in time is left, threads too."""
        self._closed = True  # What lands from now on is not copied, and nobody new is let in.
        for pair in list(self._pairs):
            self._lose(pair)
        ending = dict(self._ending)
        # What the threads report meanwhile is seen to before.
        over = [asyncio.wrap_future(end) for end in (*ending.values(), self._links.close())]
        await asyncio.wait(over, timeout=self._links.close_timeout_s)
        for pair, end in ending.items():
            if end.done():
                pair.link.join()
            else:
                log.warning("nccl_pair_left", reason="NCCL did not come back although it was told to abort")
        receives, _ = self._matcher.clear()
        for receive in receives:
            receive.fail(_closed())
        server, self._server, self._store = self._server, None, None
        if server is not None:
            server.close()
            await server.wait_closed()

    # Called by the control connections.
    def _accept(self, control: asyncio.Transport) -> _Pair | None:
        if self._closed:
            control.abort()
            return None
        assert self._store is not None, "connections come only while listening"
        self._next_pair += 1
        pair = _Pair(control, self._links.open("nccl-receive"))
        self._pairs.add(pair)
        control.write(_GREETING.pack(self._next_pair))
        self._form(pair, self._host, self._store.port, self._next_pair, LISTENER_RANK)
        return pair

    def _announced(self, pair: _Pair, tag: int, num_bytes: int) -> None:
        arrival = _Arrival(num_bytes)
        receive = arrival.receive = self._matcher.arrive(tag, arrival, num_bytes)
        if receive is not None and receive.buffer.nbytes == num_bytes:
            job = pair.link.receive(receive.buffer)
        elif num_bytes > self._links.max_unmatched_bytes:
            log.warning("nccl_pair_broken", reason="a message nobody waits for is too large", size_bytes=num_bytes)
            self._lose(pair)
            if receive is not None:
                receive.fail(PeerLost(f"a message of {num_bytes} bytes came for {receive.buffer.nbytes}"))
            return
        else:
            job = pair.link.receive_unmatched(num_bytes, keeps=receive is None and not arrival.dropped)
        pair.arrivals.add(arrival)
        self._call_back(job, partial(self._landed, pair, arrival))

    def _landed(self, pair: _Pair, arrival: _Arrival, job: Future[Buffer]) -> None:
        pair.arrivals.discard(arrival)
        arrival.error = self._loss(pair, job)
        if arrival.error is None:
            arrival.data = job.result()
        if arrival.receive is not None:
            self._deliver(arrival)

    def _deliver(self, arrival: _Arrival) -> None:
        """Tells the receive of a landed message, after copying what did not land in its buffer."""
        receive = arrival.receive
        assert receive is not None
        if arrival.error is not None:
            receive.fail(arrival.error)
        elif arrival.num_bytes != receive.buffer.nbytes:
            receive.fail(TransferError(f"a message of {arrival.num_bytes} bytes came for {receive.buffer.nbytes}"))
        elif arrival.data is receive.buffer:
            receive.complete()
        elif self._closed:
            receive.fail(_closed())
        else:
            assert arrival.data is not None, "what has landed without an error is somewhere"
            copied = self._links.copy(arrival.data, receive.buffer)
            if copied.done():
                _finish_copy(receive, copied)
            else:
                self._call_back(copied, partial(_finish_copy, receive))

    def _lose(self, pair: _Pair) -> None:
        if pair in self._pairs:
            self._pairs.discard(pair)
            end = self._ending[pair] = pair.break_off()
            self._call_back(end, partial(self._ended, pair))

    def _ended(self, pair: _Pair, _: Future[None]) -> None:
        del self._ending[pair]

    # The wire's threads.
    def _form(self, pair: _Pair, host: str, store_port: int, number: int, rank: int) -> None:
        rendezvous = Rendezvous(host=host, port=store_port, number=number, rank=rank)
        self._then(pair, pair.link.form(rendezvous), pair.report_formed)

    def _then(self, pair: _Pair, job: Future[Any], report: Callable[[PeerLost | None], None]) -> None:
        """Calls `report` on the event loop when the job is done; a failed job ends the pair."""
        self._call_back(job, lambda job: report(self._loss(pair, job)))

    def _loss(self, pair: _Pair, job: Future[Any]) -> PeerLost | None:
        error = job.exception()
        if error is None:
            return None
        self._lose(pair)
        return PeerLost(f"torch.distributed lost the peer: {error}")

    def _call_back(self, job: Future[Any], report: Callable[[Future[Any]], None]) -> None:
        """`report` is handed the job; did it have it of itself, the two would keep the payload alive as a cycle."""
        loop = asyncio.get_running_loop()
        job.add_done_callback(lambda job: loop.call_soon_threadsafe(report, job))


class _ListenerControl(asyncio.Protocol):
    """The listener's end of a pair's control connection: reads announcements."""

    def __init__(self, owner: TorchDistributedTransport) -> None:
        self._owner = owner
        self._unread = b""
        self._pair: _Pair | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._pair = self._owner._accept(transport)

    def data_received(self, data: bytes) -> None:
        self._unread += data
        whole = len(self._unread) - len(self._unread) % _ANNOUNCEMENT.size
        announcements, self._unread = self._unread[:whole], self._unread[whole:]
        for tag, num_bytes in _ANNOUNCEMENT.iter_unpack(announcements):
            if self._pair is not None and not self._pair.lost:
                self._owner._announced(self._pair, tag, num_bytes)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._pair is not None:
            self._owner._lose(self._pair)


class _ConnectorControl(asyncio.Protocol):
    """The connector's end: reads the greeting, and notices when the listener is gone."""

    def __init__(self) -> None:
        self.greeting: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.on_lost: Callable[[], None] = lambda: None
        self._unread = b""

    def data_received(self, data: bytes) -> None:
        self._unread += data
        if len(self._unread) >= _GREETING.size and not self.greeting.done():
            self.greeting.set_result(_GREETING.unpack_from(self._unread)[0])

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.greeting.done():
            self.greeting.set_exception(PeerLost("the listener hung up"))
            self.greeting.exception()  # `connect` may have given up before.
        self.on_lost()


def _finish(operation: Operation, error: PeerLost | None) -> None:
    if error is None:
        operation.complete()
    else:
        operation.fail(error)


def _finish_copy(receive: Operation, copied: Future[Buffer]) -> None:
    error = copied.exception()
    if error is None:
        receive.complete()
    else:
        receive.fail(TransferError(f"a message that came early was not copied: {error}"))


def _closed() -> PeerLost:
    return PeerLost("the transport was closed")


def _settled(operation: Operation) -> asyncio.Event:
    done = asyncio.Event()
    operation.add_done_callback(lambda _: done.set())
    return done


def _own(peer: Peer) -> _Pair:
    assert isinstance(peer, _Pair), "a peer is used with the transport that connected it"
    return peer
