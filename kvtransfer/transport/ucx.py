"""UCX: shared memory within a host, TCP or RDMA between hosts.

It drives a UCX worker of its own on the event loop, below ucxx's asyncio layer: that one allows a single context per
process and polls once per outstanding request, which a thousand waiting receives cannot afford. What arrives is taken
off UCX's queue by probing for any tag and only then received, straight into the posted buffer; so a receive that is
waiting is known to nobody but us and can be withdrawn at once, and a message for a withdrawn tag is drained.

Endpoints have UCX's error handling on. Without it UCX frees its end when a process dies and then trips over messages of
that process which are still queued: a killed prefill worker took the decode worker with it (SIGSEGV). With it, but with
its other defaults, UCX gives shared memory up for TCP; `_DEFAULTS` makes it keep shared memory and notice a dead peer.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import ucxx._lib.libucxx as ucx
from ucxx._lib.arr import Array
from ucxx.exceptions import UCXError

from kvtransfer.transport.base import Buffer, Operation, Peer
from kvtransfer.transport.mailbox import Mailbox
from kvtransfer.transport.ucx_address import pack_address, unpack_address
from kvtransfer.transport.ucx_canary import PING_BYTES, Canary
from pdserve.base.errors import PdserveError, PeerLost, SetupError, TransferError

log = logging.getLogger(__name__)

#: Other work of the event loop gets a turn after this long.
_SLICE_S = 0.001
#: How often the watchdog looks: it bounds what a missed wake-up of UCX's descriptor costs, and finds a jammed queue.
_WATCHDOG_S = 0.5
#: Looks that a ping may stay unanswered.
_MAX_SILENT_LOOKS = 2
#: UCX closes at once what has error handling; this bounds it if ever it does not.
_CLOSE_PERIOD_NS = 100_000_000
_ANY_TAG = (ucx.UCXXTag(0), ucx.UCXXTagMask(0))
#: Segments of 48 KiB instead of 8 KiB cost the same and are a quarter to a half faster.
_DEFAULTS = {
    "POSIX_ERROR_HANDLING": "y",
    "SYSV_ERROR_HANDLING": "y",
    "POSIX_SEG_SIZE": "49152",
    "SYSV_SEG_SIZE": "49152",
    "KEEPALIVE_INTERVAL": "1s",
}


@dataclass(eq=False, slots=True)
class UcxPeer:
    """An endpoint to one UCX worker."""

    endpoint: ucx.UCXEndpoint | None
    lost: bool = False

    @property
    def closed(self) -> bool:
        """Disconnected, failed, or found dead by UCX's keep-alive."""
        return self.lost or self.endpoint is None or not self.endpoint.alive


@dataclass(eq=False, slots=True)
class _InFlight:
    """A request UCX works on. It keeps the buffer alive as long as UCX may touch it."""

    request: ucx.UCXRequest
    operation: Operation
    array: Array
    peer: UcxPeer | None = None


@dataclass(eq=False, slots=True)
class _Incarnation:
    """One UCX worker and everything that dies with it."""

    context: ucx.UCXContext
    worker: ucx.UCXWorker
    address: bytes
    inflight: list[_InFlight] = field(default_factory=list)
    peers: list[UcxPeer] = field(default_factory=list)
    #: Something came in or went out since the watchdog looked last.
    moved: bool = False
    canary: Canary | None = None
    ping: Operation | None = None
    silent_looks: int = 0
    #: Reported as failed already, while UCX may still hold on to the buffer.
    abandoned: list[_InFlight] = field(default_factory=list)


class UcxTransport:
    """`Transport` over UCX. `options` beat `_DEFAULTS`, and those the user's UCX_* settings; all others are the user's.

    `drain_timeout_s` bounds how long `cancel` waits for a message that is landing. When its sender was stopped or died
    in a way that UCX does not report, only taking the whole UCX worker down makes the buffer safe: that is what happens
    then, all other operations fail with `PeerLost`, and the address changes.
    """

    name = "ucx"

    def __init__(self, *, options: Mapping[str, str] | None = None, drain_timeout_s: float = 5.0) -> None:
        self._options = _DEFAULTS | dict(options or {})
        self._drain_timeout_s = drain_timeout_s
        self._live: _Incarnation | None = None
        self._mailbox: Mailbox[ucx.TagProbeResult] = Mailbox(self._drain)
        self._turn: asyncio.Handle | None = None
        self._watchdog: asyncio.TimerHandle | None = None

    async def listen(self) -> bytes:
        """The address of the UCX worker, with where it runs."""
        return self._up().address

    async def connect(self, address: bytes) -> UcxPeer:
        """Makes an endpoint; whether anybody is there shows when sending, within some seconds."""
        live = self._up()
        worker_address = ucx.UCXAddress.create_from_buffer(unpack_address(address))
        try:
            endpoint = ucx.UCXEndpoint.create_from_worker_address(live.worker, worker_address, True)
        except UCXError as error:
            raise PeerLost(f"UCX cannot reach the peer: {error}") from error
        self._kick()
        peer = UcxPeer(endpoint)
        live.peers.append(peer)
        return peer

    def disconnect(self, peer: Peer) -> None:
        """Closes the endpoint without waiting for the other side."""
        own = _own(peer)
        if own.lost:
            return
        self._lose(own, PeerLost("the peer was disconnected"))
        if own.endpoint is not None and self._live is not None:
            own.endpoint.close_blocking(_CLOSE_PERIOD_NS, 1)
            self._live.peers.remove(own)
        own.endpoint = None
        self._kick()

    def post_receive(self, tag: int, buffer: Buffer) -> Operation:
        """Waits in our own table; UCX sees the buffer when the message is there."""
        receive = Operation(tag, buffer)
        self._up()
        early = self._mailbox.post(receive)
        if early is not None:
            self._receive(early, receive)
            self._kick()
        return receive

    def post_send(self, peer: Peer, tag: int, buffer: Buffer) -> Operation:
        """Hands the buffer to UCX."""
        send = Operation(tag, buffer)
        own = _own(peer)
        if own.closed or own.endpoint is None or self._live is None:
            send.fail(PeerLost("the peer was disconnected"))
            return send
        array = Array(buffer)
        try:
            request = own.endpoint.tag_send(array, ucx.UCXXTag(tag))
        except UCXError as error:
            send.fail(PeerLost(f"UCX cannot send to the peer: {error}"))
            return send
        self._live.inflight.append(_InFlight(request, send, array, own))
        self._kick()
        return send

    async def cancel(self, receives: Iterable[Operation]) -> None:
        """Withdraws what waits, and waits for what is landing."""
        landing = []
        for receive in receives:
            if self._mailbox.withdraw(receive):
                receive.mark_cancelled()
            elif not receive.done:
                landing.append(receive)
        if not landing:
            return
        try:
            async with asyncio.timeout(self._drain_timeout_s):
                for receive in landing:
                    await _settled(receive)
        except TimeoutError:
            log.warning("ucx_worker_restarted stuck_receives=%d", sum(not receive.done for receive in landing))
            self._down(PeerLost("the sender stopped in the middle of a message"))

    async def close(self) -> None:
        """Takes the UCX worker down."""
        self._down(PeerLost("the transport was closed"))

    # The UCX worker's life.
    def _up(self) -> _Incarnation:
        if self._live is not None:
            return self._live
        try:
            context = ucx.UCXContext(self._options)
            worker = ucx.UCXWorker(context, enable_delayed_submission=False, enable_python_future=False)
            worker.init_blocking_progress_mode()
        except UCXError as error:
            raise SetupError(f"UCX does not start with options {self._options}: {error}") from error
        self._live = _Incarnation(context, worker, pack_address(worker.address.tobytes()))
        loop = asyncio.get_running_loop()
        loop.add_reader(worker.epoll_file_descriptor, self._progress)
        self._watchdog = loop.call_later(_WATCHDOG_S, self._watch)
        self._kick()
        return self._live

    def _down(self, reason: PdserveError) -> None:
        live, self._live = self._live, None
        if live is None:
            return
        asyncio.get_running_loop().remove_reader(live.worker.epoll_file_descriptor)
        for handle in (self._turn, self._watchdog):
            if handle is not None:
                handle.cancel()
        self._turn = self._watchdog = None
        receives, _ = self._mailbox.clear()
        flights = list(live.inflight)
        for peer in live.peers:
            peer.lost, peer.endpoint = True, None
        # UCX writes only while its worker makes progress or exists: first it goes, then the buffers are free.
        live.inflight.clear()
        live.abandoned.clear()
        operations = [*receives, *(flight.operation for flight in flights)]
        del flights, live
        for operation in operations:
            operation.fail(reason)

    # Progress.
    def _kick(self) -> None:
        if self._turn is None and self._live is not None:
            self._turn = asyncio.get_running_loop().call_soon(self._progress)

    def _watch(self) -> None:
        live = self._live
        assert live is not None, "the watchdog lives as long as the UCX worker"
        self._watchdog = asyncio.get_running_loop().call_later(_WATCHDOG_S, self._watch)
        self._progress()
        waiting = live.inflight or self._mailbox.num_posted > (live.ping is not None)
        if live.moved or not waiting or (live.ping is not None and live.ping.done):
            live.moved = False
            self._forget_ping(live)
        elif live.ping is None:
            self._send_ping(live)
        else:
            live.silent_looks += 1
            if live.silent_looks >= _MAX_SILENT_LOOKS:
                log.warning("ucx_worker_restarted reason=its shared-memory queue is jammed, a peer died writing to it")
                self._down(PeerLost("a process that died has jammed the shared-memory queue"))

    def _send_ping(self, live: _Incarnation) -> None:
        if live.canary is None:
            live.canary = Canary(self._options, unpack_address(live.address))
        live.ping = Operation(secrets.randbits(64), np.zeros(PING_BYTES, np.uint8))
        self._mailbox.post(live.ping)
        live.canary.ping(live.ping.tag)
        self._kick()

    def _forget_ping(self, live: _Incarnation) -> None:
        if live.ping is not None:
            self._mailbox.withdraw(live.ping)
            live.ping, live.silent_looks = None, 0

    def _progress(self) -> None:
        if self._turn is not None:
            self._turn.cancel()
            self._turn = None
        live = self._live
        if live is None:
            return
        until = time.monotonic() + _SLICE_S
        while time.monotonic() < until:
            moved = live.worker.progress_once()
            moved = self._take_arrivals(live.worker) or moved
            moved = self._reap(live) or moved
            if live.ping is not None and live.canary is not None:
                moved = live.canary.progress() or moved
            # Armed: the descriptor wakes us. Refused: something came in between.
            if not moved and live.worker.arm():
                return
        self._kick()

    def _take_arrivals(self, worker: ucx.UCXWorker) -> bool:
        moved = False
        while (message := worker.tag_probe(*_ANY_TAG, remove=True)).matched:
            moved = True
            receive = self._mailbox.arrive(message.sender_tag.value, message)
            if receive is not None:
                self._receive(message, receive)
        return moved

    def _reap(self, live: _Incarnation) -> bool:
        finished = [flight for flight in live.inflight if flight.request.completed]
        if not finished:
            return False
        live.inflight = [flight for flight in live.inflight if not flight.request.completed]
        live.abandoned = [flight for flight in live.abandoned if not flight.request.completed]
        live.moved = True
        for flight in finished:
            try:
                flight.request.check_error()
            except UCXError as error:
                lost = PeerLost(f"UCX gave a message up: {error}")
                flight.operation.fail(lost)
                if flight.peer is not None and not flight.peer.lost:
                    self._lose(flight.peer, lost)
            else:
                flight.operation.complete()
        return True

    def _receive(self, message: ucx.TagProbeResult, receive: Operation) -> None:
        if message.length != receive.buffer.nbytes:
            self._drain(message)
            receive.fail(TransferError(f"a message of {message.length} bytes came for {receive.buffer.nbytes}"))
        else:
            self._start_receive(message, receive)

    def _drain(self, message: ucx.TagProbeResult) -> None:
        """Receives what nobody wants, so that its sender is not kept waiting."""
        self._start_receive(message, Operation(0, np.empty(message.length, np.uint8)))

    def _start_receive(self, message: ucx.TagProbeResult, receive: Operation) -> None:
        live = self._up()
        array = Array(receive.buffer)
        live.inflight.append(_InFlight(live.worker.tag_recv_with_handle(array, message), receive, array))

    def _lose(self, peer: UcxPeer, reason: PdserveError) -> None:
        peer.lost = True
        if self._live is None:
            return
        lost = [flight for flight in self._live.inflight if flight.peer is peer]
        self._live.inflight = [flight for flight in self._live.inflight if flight.peer is not peer]
        self._live.abandoned.extend(flight for flight in lost if not flight.request.completed)
        for flight in lost:
            flight.operation.fail(reason)


async def _settled(operation: Operation) -> None:
    done = asyncio.Event()
    operation.add_done_callback(lambda _: done.set())
    await done.wait()


def _own(peer: Peer) -> UcxPeer:
    assert isinstance(peer, UcxPeer), "a peer is used with the transport that connected it"
    return peer
