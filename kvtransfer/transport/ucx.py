"""UCX: one process reads another's memory within a host (CMA), TCP or RDMA between hosts.

It drives a UCX worker of its own on the event loop, below ucxx's asyncio layer: that one allows a single context per
process and polls once per outstanding request, which a thousand waiting receives cannot afford. What arrives is taken
off UCX's queue by probing for any tag and only then received, straight into the posted buffer; so a receive that is
waiting is known to nobody but us and can be withdrawn at once, and a message for a withdrawn tag is drained.

Endpoints have UCX's error handling on, and no memory is shared: decision 0007 says what either cost.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import ucxx._lib.libucxx as ucx
from ucxx._lib.arr import Array
from ucxx.exceptions import UCXError

from kvtransfer.transport.base import Buffer, Operation, Peer
from kvtransfer.transport.tag_matcher import TagMatcher
from kvtransfer.transport.ucx_address import pack_address, unpack_address
from pdserve.base.config import variable
from pdserve.base.errors import PdserveError, PeerLost, SetupError, TransferError
from pdserve.base.logs import get_logger

log = get_logger(__name__)

#: Other work of the event loop gets a turn after this long.
_SLICE_S = 0.001
#: UCX closes at once what has error handling; this bounds it if ever it does not.
_CLOSE_PERIOD_NS = 100_000_000
_ANY_TAG = (ucx.UCXXTag(0), ucx.UCXXTagMask(0))
#: A variable UCX_<name> of the environment beats each of them.
_DEFAULTS = {
    # Everything but shared memory, whose queue a killed peer can jam for all others. Control goes over TCP then.
    "TLS": "^posix,sysv",
    # UCX uses CMA with error handling only when it believes that memory can be taken back from a reader. It cannot; a
    # receiver that still reads a block its sender has given up gets wrong bytes, which the digests find.
    "CMA_MEMORY_INVALIDATE": "y",
    "KEEPALIVE_INTERVAL": "1s",
}
#: Besides, for buffers in a GPU's memory. UCX knows it only where its CUDA module could be loaded.
_CUDA_DEFAULTS = {
    # A receiver reads from the sender's memory, as with CMA. By itself UCX does so only where it finds NVLink, which
    # two processes on one GPU do not need.
    "CUDA_IPC_ENABLE_GET_ZCOPY": "on",
    # What nobody wants is drained to host memory, for which UCX would take 512 MiB of the GPU to copy through.
    "RNDV_FRAG_MEM_TYPES": "host",
}
_CUDA_ADVICE = " This UCX has no CUDA here: use --handover-memory host."


@dataclass(eq=False, slots=True)
class UcxPeer:
    """An endpoint to one UCX worker."""

    endpoint: ucx.UCXEndpoint | None
    lost: bool = False

    @property
    def closed(self) -> bool:
        """Disconnected, failed, or found dead by UCX."""
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
    #: Oldest first: they complete nearly in order.
    inflight: deque[_InFlight] = field(default_factory=deque)
    peers: list[UcxPeer] = field(default_factory=list)


class UcxTransport:
    """`Transport` over UCX. The user's UCX_* variables beat our defaults.

    `drain_timeout_s` bounds how long `cancel` waits for a message that is landing. When its sender was stopped or died
    in a way that UCX does not report, only taking the whole UCX worker down makes the buffer safe: that is what happens
    then, all other operations fail with `PeerLost`, and the address changes.
    """

    name = "ucx"

    def __init__(self, *, drain_timeout_s: float = 5.0, device_memory: bool = False) -> None:
        """`device_memory`: buffers are in the memory of this process's GPU."""
        self._drain_timeout_s = drain_timeout_s
        self._device_memory = device_memory
        self._defaults = _DEFAULTS | _CUDA_DEFAULTS if device_memory else _DEFAULTS
        self._live: _Incarnation | None = None
        self._matcher: TagMatcher[ucx.TagProbeResult] = TagMatcher(self._drain)
        self._turn: asyncio.Handle | None = None

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
        """Closes the endpoint without waiting for the other side; UCX then fails what is under way."""
        own = _own(peer)
        endpoint, own.endpoint, own.lost = own.endpoint, None, True
        if endpoint is not None and self._live is not None:
            self._live.peers.remove(own)
            endpoint.close_blocking(_CLOSE_PERIOD_NS, 1)
            self._kick()

    def post_receive(self, tag: int, buffer: Buffer) -> Operation:
        """Waits in our own table; UCX sees the buffer when the message is there."""
        receive = Operation(tag, buffer)
        live = self._up()
        early = self._matcher.post(receive)
        if early is not None:
            self._receive(live, early, receive)
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
            if self._matcher.withdraw(receive):
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
            stuck = sum(not receive.done for receive in landing)
            log.warning("ucx_worker_replaced", reason="a message that was landing did not finish", receives=stuck)
            self._down(PeerLost("the sender stopped in the middle of a message"))

    async def close(self) -> None:
        """Takes the UCX worker down."""
        self._down(PeerLost("the transport was closed"))

    # The UCX worker's life.
    def _up(self) -> _Incarnation:
        if self._live is not None:
            return self._live
        options = {name: value for name, value in self._defaults.items() if variable(f"UCX_{name}") is None}
        try:
            context = ucx.UCXContext(options)
            worker = ucx.UCXWorker(context, enable_delayed_submission=False, enable_python_future=False)
            worker.init_blocking_progress_mode()
        except UCXError as error:
            advice = _CUDA_ADVICE if self._device_memory else ""
            raise SetupError(f"UCX does not start with options {options}: {error}.{advice}") from error
        self._live = _Incarnation(context, worker, pack_address(worker.address.tobytes()))
        asyncio.get_running_loop().add_reader(worker.epoll_file_descriptor, self._progress)
        self._kick()
        return self._live

    def _down(self, reason: PdserveError) -> None:
        live, self._live = self._live, None
        if live is None:
            return
        asyncio.get_running_loop().remove_reader(live.worker.epoll_file_descriptor)
        if self._turn is not None:
            self._turn.cancel()
            self._turn = None
        receives, _ = self._matcher.clear()
        operations = [*receives, *(flight.operation for flight in live.inflight)]
        for peer in live.peers:
            peer.lost, peer.endpoint = True, None
        # UCX writes only while its worker makes progress or exists: first it goes, then the buffers are free.
        live.inflight.clear()
        del live
        if self._device_memory:
            # Copies that were queued on the GPU go on without it.
            import torch

            torch.cuda.synchronize()
        for operation in operations:
            operation.fail(reason)

    # Progress. What completes an operation calls back, and that may post or disconnect.
    def _kick(self) -> None:
        if self._turn is None and self._live is not None:
            self._turn = asyncio.get_running_loop().call_soon(self._progress)

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
            moved = self._take_arrivals(live) or moved
            moved = _reap_oldest(live) or moved
            # Armed: the descriptor wakes us. Refused: something came in between.
            if not moved and not _reap_all(live) and live.worker.arm():
                return
        _reap_all(live)
        self._kick()

    def _take_arrivals(self, live: _Incarnation) -> bool:
        moved = False
        while (message := live.worker.tag_probe(*_ANY_TAG, remove=True)).matched:
            moved = True
            receive = self._matcher.arrive(message.sender_tag.value, message)
            if receive is not None:
                self._receive(live, message, receive)
        return moved

    def _receive(self, live: _Incarnation, message: ucx.TagProbeResult, receive: Operation) -> None:
        if message.length == receive.buffer.nbytes:
            _start_receive(live, message, receive)
        else:
            self._drain(message)
            receive.fail(TransferError(f"a message of {message.length} bytes came for {receive.buffer.nbytes}"))

    def _drain(self, message: ucx.TagProbeResult) -> None:
        """Receives what nobody wants, so that its sender is not kept waiting."""
        assert self._live is not None, "messages come from a live worker"
        _start_receive(self._live, message, Operation(0, np.empty(message.length, np.uint8)))


def _start_receive(live: _Incarnation, message: ucx.TagProbeResult, receive: Operation) -> None:
    array = Array(receive.buffer)
    live.inflight.append(_InFlight(live.worker.tag_recv_with_handle(array, message), receive, array))


def _reap_oldest(live: _Incarnation) -> bool:
    """Ends what has completed, up to the first request that has not: cheap enough for every turn."""
    reaped = False
    while live.inflight and live.inflight[0].request.completed:
        reaped = True
        _end(live.inflight.popleft())
    return reaped


def _reap_all(live: _Incarnation) -> bool:
    """Ends what has completed anywhere, past requests to a peer that does not answer."""
    flights, live.inflight = live.inflight, deque()
    finished: list[_InFlight] = []
    for flight in flights:
        (finished if flight.request.completed else live.inflight).append(flight)
    for flight in finished:
        _end(flight)
    return bool(finished)


def _end(flight: _InFlight) -> None:
    try:
        flight.request.check_error()
    except UCXError as error:
        if flight.peer is not None:
            flight.peer.lost = True
        flight.operation.fail(PeerLost(f"UCX gave a message up: {error}"))
    else:
        flight.operation.complete()


async def _settled(operation: Operation) -> None:
    done = asyncio.Event()
    operation.add_done_callback(lambda _: done.set())
    await done.wait()


def _own(peer: Peer) -> UcxPeer:
    assert isinstance(peer, UcxPeer), "a peer is used with the transport that connected it"
    return peer
