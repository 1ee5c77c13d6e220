"""torch.distributed point-to-point: one two-rank process group per connected pair, so that peers can come and go.

A plain TCP connection per pair carries the rendezvous and announces each message (tag and size); the group carries
only payloads, in the order announced. So 64-bit tags need no room in gloo's 32 bits or NCCL's none, and nothing waits
inside torch but transfers that are really happening. Buffers are host memory, which gloo moves; a pool in GPU memory
would form its groups with NCCL in `_form_group`.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta

import numpy as np
import torch
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, TCPStore, Work

from kvtransfer.transport.base import Buffer, Operation, Peer
from kvtransfer.transport.mailbox import Mailbox
from pdserve.base.errors import PeerLost, SetupError, TransferError
from pdserve.base.logs import get_logger

log = get_logger(__name__)

_MAGIC = "pdnccl1"
#: The listener's greeting: number of the pair. The connector's announcements: tag and bytes of the next payload.
_GREETING = struct.Struct("<Q")
_ANNOUNCEMENT = struct.Struct("<QQ")
_MAX_MESSAGE_BYTES = 1 << 30
#: The store looks up the name of whoever connects, which takes 5 s or 10 s where name service loses questions.
_RENDEZVOUS_TIMEOUT = timedelta(seconds=20)
#: For one message. Running into it closes the connection; `_Pair.break_off` is the quicker way.
_TRANSFER_TIMEOUT = timedelta(seconds=5)
_AT_ONCE = timedelta(milliseconds=1)
_LISTENER_RANK, _CONNECTOR_RANK = 0, 1
_PAYLOAD_TAG, _FUSE_TAG = 0, 1


@dataclass(eq=False, slots=True)
class _Arrival:
    """A message on its way in: into its receive's buffer, or beside it when that is not posted or does not fit."""

    data: Buffer
    receive: Operation | None = None
    landed: bool = False
    error: PeerLost | None = None


@dataclass(eq=False, slots=True)
class _Pair:
    """A process group with one other process, and the thread that waits in it."""

    control: asyncio.Transport
    thread: ThreadPoolExecutor
    group: ProcessGroupGloo | None = None
    #: A receive that nobody answers, there to be timed out.
    fuse: Work | None = None
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

    def wait_for(self, start: Callable[[ProcessGroupGloo], Work]) -> None:
        """On the pair's thread: one transfer, from start to end."""
        if self.lost or self.group is None:
            raise RuntimeError("the pair was broken off")
        start(self.group).wait(_TRANSFER_TIMEOUT)

    def break_off(self) -> None:
        """Ends what the thread waits for, and lets it start nothing more.

        A wait that times out makes gloo close the connection and wake who waits for a transfer. It is the wait for a
        transfer of its own: one that joined the thread's could take the completion the thread waits for. Whom gloo
        forgets to wake (the sender of a message half-way through the socket) its own timeout ends.
        """
        self.lost = True
        self.control.abort()
        if self.fuse is not None:
            with contextlib.suppress(RuntimeError):
                self.fuse.wait(_AT_ONCE)
        self.thread.shutdown(wait=False)


class NcclTransport:
    """`Transport` over torch.distributed. `host` is the address at which peers reach this process."""

    name = "nccl"

    def __init__(self, *, host: str = "127.0.0.1", drain_timeout_s: float = 5.0) -> None:
        self._host = host
        self._drain_timeout_s = drain_timeout_s
        self._mailbox: Mailbox[_Arrival] = Mailbox(lambda arrival: None)
        self._pairs: set[_Pair] = set()
        self._next_pair = 0
        self._server: asyncio.Server | None = None
        self._store: TCPStore | None = None

    async def listen(self) -> bytes:
        """Host, control port and store port; the ports are opened by the first call."""
        if self._server is None:
            try:
                loop = asyncio.get_running_loop()
                self._server = await loop.create_server(lambda: _ListenerControl(self), self._host, 0)
                self._store = TCPStore(self._host, 0, is_master=True, wait_for_workers=False)
            except OSError as error:
                raise SetupError(f"cannot listen on {self._host}: {error}") from error
        assert self._store is not None
        port = self._server.sockets[0].getsockname()[1]
        return f"{_MAGIC} {self._host} {port} {self._store.port}".encode()

    async def connect(self, address: bytes) -> _Pair:
        """Forms a group with the listener.

        Raises: PeerLost.
        """
        host, port, store_port = _parse_address(address)
        try:
            control, protocol = await asyncio.get_running_loop().create_connection(_ConnectorControl, host, port)
        except OSError as error:
            raise PeerLost(f"cannot connect to {host}:{port}: {error}") from error
        pair = _Pair(control, ThreadPoolExecutor(1, thread_name_prefix="nccl-send"))
        protocol.on_lost = lambda: self._lose(pair)
        self._pairs.add(pair)
        try:
            number = await protocol.greeting
            self._form(pair, host, store_port, number, _CONNECTOR_RANK)
            await asyncio.shield(pair.formed)
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
        early = self._mailbox.post(receive)
        if early is not None:
            early.receive = receive
            if early.landed:
                _deliver(early)
        return receive

    def post_send(self, peer: Peer, tag: int, buffer: Buffer) -> Operation:
        """Announces the message and queues its payload."""
        send = Operation(tag, buffer)
        pair = _own(peer)
        if pair.lost:
            send.fail(PeerLost("the peer was disconnected"))
            return send
        pair.control.write(_ANNOUNCEMENT.pack(tag, buffer.nbytes))
        payload = torch.from_numpy(buffer)
        self._then(pair, pair.thread.submit(_send, pair, payload), lambda error: _finish(send, error))
        return send

    async def cancel(self, receives: Iterable[Operation]) -> None:
        """Withdraws what was not announced; waits for what is landing, and breaks its pair when that takes too long."""
        landing = set()
        for receive in receives:
            if self._mailbox.withdraw(receive):
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
        """Breaks every group and closes the ports."""
        pairs = list(self._pairs)
        for pair in pairs:
            self._lose(pair)
        for pair in pairs:
            pair.thread.shutdown(wait=True)
            pair.group = pair.fuse = None
        receives, _ = self._mailbox.clear()
        for receive in receives:
            receive.fail(PeerLost("the transport was closed"))
        server, self._server, self._store = self._server, None, None
        if server is not None:
            server.close()
            await server.wait_closed()
        # What the threads reported last is on the event loop's list; let it run.
        await asyncio.sleep(0)

    # Called by the control connections.
    def _accept(self, control: asyncio.Transport) -> _Pair:
        assert self._store is not None, "connections come only while listening"
        self._next_pair += 1
        pair = _Pair(control, ThreadPoolExecutor(1, thread_name_prefix="nccl-receive"))
        self._pairs.add(pair)
        control.write(_GREETING.pack(self._next_pair))
        self._form(pair, self._host, self._store.port, self._next_pair, _LISTENER_RANK)
        return pair

    def _announced(self, pair: _Pair, tag: int, num_bytes: int) -> None:
        if num_bytes > _MAX_MESSAGE_BYTES:
            log.warning("nccl_pair_broken", reason="a message was announced that is too large", size_bytes=num_bytes)
            self._lose(pair)
            return
        arrival = _Arrival(np.empty(0, np.uint8))
        arrival.receive = self._mailbox.arrive(tag, arrival)
        fits = arrival.receive is not None and arrival.receive.buffer.nbytes == num_bytes
        arrival.data = arrival.receive.buffer if fits and arrival.receive else np.empty(num_bytes, np.uint8)
        pair.arrivals.add(arrival)
        payload = torch.from_numpy(arrival.data)
        self._then(pair, pair.thread.submit(_receive, pair, payload), lambda error: self._landed(pair, arrival, error))

    def _landed(self, pair: _Pair, arrival: _Arrival, error: PeerLost | None) -> None:
        pair.arrivals.discard(arrival)
        arrival.landed, arrival.error = True, error
        if arrival.receive is not None:
            _deliver(arrival)

    def _lose(self, pair: _Pair) -> None:
        if pair in self._pairs:
            self._pairs.discard(pair)
            pair.break_off()

    # The pair's thread.
    def _form(self, pair: _Pair, host: str, store_port: int, number: int, rank: int) -> None:
        job = pair.thread.submit(_form_group, pair, self._host, (host, store_port), number, rank)
        self._then(pair, job, pair.report_formed)

    def _then(self, pair: _Pair, job: Future[None], report: Callable[[PeerLost | None], None]) -> None:
        """Calls `report` on the event loop when the job is done; a failed job ends the pair."""
        loop = asyncio.get_running_loop()

        def on_loop() -> None:
            error = job.exception()
            lost = None if error is None else PeerLost(f"torch.distributed lost the peer: {error}")
            if lost is not None:
                self._lose(pair)
            report(lost)

        job.add_done_callback(lambda _: loop.call_soon_threadsafe(on_loop))


class _ListenerControl(asyncio.Protocol):
    """The listener's end of a pair's control connection: reads announcements."""

    def __init__(self, owner: NcclTransport) -> None:
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


def _form_group(pair: _Pair, own_host: str, store_address: tuple[str, int], number: int, rank: int) -> None:
    store = TCPStore(*store_address, is_master=False, wait_for_workers=False, timeout=_RENDEZVOUS_TIMEOUT)
    # Torch's type stubs do not know gloo's options, nor that its groups send and receive.
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname=own_host)]
    options._timeout = _RENDEZVOUS_TIMEOUT
    group = ProcessGroupGloo(PrefixStore(f"pair/{number}", store), rank, 2, options)
    other = _CONNECTOR_RANK if rank == _LISTENER_RANK else _LISTENER_RANK
    pair.fuse = group.recv([torch.empty(1)], other, _FUSE_TAG)  # type: ignore[attr-defined]
    pair.group = group


def _send(pair: _Pair, payload: torch.Tensor) -> None:
    pair.wait_for(lambda group: group.send([payload], _LISTENER_RANK, _PAYLOAD_TAG))  # type: ignore[attr-defined]


def _receive(pair: _Pair, payload: torch.Tensor) -> None:
    pair.wait_for(lambda group: group.recv([payload], _CONNECTOR_RANK, _PAYLOAD_TAG))  # type: ignore[attr-defined]


def _finish(operation: Operation, error: PeerLost | None) -> None:
    if error is None:
        operation.complete()
    else:
        operation.fail(error)


def _deliver(arrival: _Arrival) -> None:
    """Tells the receive of a landed message, after copying what did not land in its buffer."""
    receive = arrival.receive
    assert receive is not None
    if arrival.error is not None:
        receive.fail(arrival.error)
    elif arrival.data.nbytes != receive.buffer.nbytes:
        receive.fail(TransferError(f"a message of {arrival.data.nbytes} bytes came for {receive.buffer.nbytes}"))
    else:
        if arrival.data is not receive.buffer:
            receive.buffer[:] = arrival.data
        receive.complete()


def _settled(operation: Operation) -> asyncio.Event:
    done = asyncio.Event()
    operation.add_done_callback(lambda _: done.set())
    return done


def _parse_address(address: bytes) -> tuple[str, int, int]:
    parts = address.decode(errors="replace").split(" ")
    if len(parts) != 4 or parts[0] != _MAGIC or not (parts[2].isdecimal() and parts[3].isdecimal()):
        raise PeerLost(f"the data address ({len(address)} bytes) is not one of the nccl transport")
    return parts[1], int(parts[2]), int(parts[3])


def _own(peer: Peer) -> _Pair:
    assert isinstance(peer, _Pair), "a peer is used with the transport that connected it"
    return peer
