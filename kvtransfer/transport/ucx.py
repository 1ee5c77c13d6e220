"""UCX: one process reads another's memory within a host (CMA), TCP or RDMA between hosts.

The transport drives a UCX worker of its own on the event loop, below ucxx's asyncio layer. That layer allows a single
context per process and polls once per outstanding request, which is too slow with a thousand waiting receives.

Arriving messages are probed for by any tag, and only then received, straight into the posted buffer. UCX does not know
waiting receives, so they can be withdrawn at once. A message for a withdrawn tag is drained.

UCX's error handling is on for endpoints, and no memory is shared. Decision 7 gives the cost of both.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

import numpy as np
import ucxx._lib.libucxx as ucx
from ucxx.exceptions import UCXError

from kvtransfer.transport.base import Buffer, Operation, Peer
from kvtransfer.transport.tag_matcher import OpensInboxes, TagMatcher
from kvtransfer.transport.ucx_address import unpack_address
from kvtransfer.transport.ucx_context import UcxContext
from kvtransfer.transport.ucx_guard import UcxGuard
from kvtransfer.transport.ucx_worker import UcxPeer, UcxWorker, own_peer
from pdserve.base.errors import PdserveError, PeerLost, TransferError
from pdserve.base.logs import get_logger
from pdserve.observe.open_files import SpareFiles

log = get_logger(__name__)

#: Time until a process without a free file looks for one again.
_NO_FILE_S = 0.05
#: Time after which a poll yields to other work of the event loop.
_SLICE_S = 0.001
#: Limit for closing an endpoint. With error handling UCX closes it at once.
_CLOSE_PERIOD_NS = 100_000_000
_ANY_TAG = (ucx.UCXXTag(0), ucx.UCXXTagMask(0))
#: Bytes of messages without an inbox that are kept. They are strays.
_MAX_EARLY_BYTES = 64 << 20
#: Memory for unwanted messages, which overwrite each other. Of a larger one, UCX takes no more and ends it.
_DISCARD_BYTES = 64 << 20


class UcxTransport(OpensInboxes[ucx.TagProbeResult]):
    """`Transport` over UCX. The user's UCX_* variables override the defaults.

    `drain_timeout_s` bounds how long `cancel` waits for an arriving message. If its sender was stopped, or died in a
    way that UCX does not report, only closing the UCX worker makes the buffer safe. That happens then: all other
    operations fail with `PeerLost`, and the data address changes.
    """

    name = "ucx"

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        drain_timeout_s: float = 5.0,
        device_memory: bool = False,
        guarded: bool = False,
    ) -> None:
        """`host`: the address on whose network device UCX listens, unless UCX_NET_DEVICES names others.

        `device_memory`: whether buffers are in the memory of a GPU. `guarded`: whether strangers are kept out of UCX.
        """
        self._context = UcxContext(host, device_memory=device_memory)
        self._drain_timeout_s = drain_timeout_s
        self._device_memory = device_memory
        self.guard = UcxGuard(is_active=guarded, pause=self._pause, resume=self._resume)
        self._worker: UcxWorker | None = None
        self._is_paused = False
        self._files: SpareFiles | None = None
        self._sweeper: asyncio.Task[None] | None = None
        self._matcher = TagMatcher[ucx.TagProbeResult](self._drain, max_early_bytes=_MAX_EARLY_BYTES)
        self._discarded: Buffer | None = None
        self._scheduled_poll: asyncio.Handle | None = None

    @property
    def listens(self) -> bool:
        """Whether the UCX worker runs."""
        return self._worker is not None

    async def listen(self) -> bytes:
        """The data address of the UCX worker, which is started by the first call."""
        return self._listening().address

    async def connect(self, address: bytes) -> UcxPeer:
        """Creates an endpoint. A dead peer shows when sending, within some seconds."""
        worker = self._listening()
        if not self._can_open():
            raise PeerLost("UCX cannot connect to the peer: too many open files.")
        worker_address = ucx.UCXAddress.create_from_buffer(unpack_address(address))
        try:
            endpoint = ucx.UCXEndpoint.create_from_worker_address(worker.handle, worker_address, True)
        except UCXError as error:
            raise PeerLost(f"UCX cannot reach the peer: {error}.") from error
        self._schedule_poll()
        peer = UcxPeer(endpoint)
        worker.peers.append(peer)
        return peer

    def offered_lanes(self) -> tuple[str, ...]:
        """Transports that UCX has found on this machine and that UCX_TLS allows. It need not listen for that."""
        return self._context.lanes()

    def lanes(self, peer: Peer) -> tuple[str, ...]:
        """Transports of the endpoint. UCX chooses them when it is created; empty when the peer is disconnected."""
        return own_peer(peer).lanes()

    def protocol(self, peer: Peer, *, device_memory: bool) -> str:
        """What UCX_PROTO_INFO shows."""
        return own_peer(peer).protocol(device_memory=device_memory)

    def disconnect(self, peer: Peer) -> None:
        """Closes the endpoint without waiting for the other side. UCX then fails its requests."""
        own = own_peer(peer)
        endpoint, own.endpoint, own.lost = own.endpoint, None, True
        if endpoint is not None and self._worker is not None:
            self._worker.peers.remove(own)
            endpoint.close_blocking(_CLOSE_PERIOD_NS, 1)
            self._schedule_poll()

    def dismiss(self, tag_base: int) -> None:
        """Closes an inbox. Its messages are drained."""
        super().dismiss(tag_base)
        self._schedule_poll()

    def post_receive(self, tag: int, buffer: Buffer, digest: Callable[[Buffer], bytes] | None = None) -> Operation:
        """Adds the receive to our own table; UCX gets the buffer when the message is there."""
        receive = Operation(tag, buffer, digest)
        worker = self._up()
        early = self._matcher.post(receive)
        if early is not None:
            self._receive(worker, early, receive)
            self._schedule_poll()
        return receive

    def post_send(self, peer: Peer, tag: int, buffer: Buffer) -> Operation:
        """Hands the buffer to UCX."""
        send = Operation(tag, buffer)
        own = own_peer(peer)
        if own.closed or own.endpoint is None or self._worker is None:
            send.fail(PeerLost("The peer was disconnected."))
            return send
        try:
            self._worker.send(own, send)
        except UCXError as error:
            send.fail(PeerLost(f"UCX cannot send to the peer: {error}."))
            return send
        self._schedule_poll()
        return send

    async def cancel(self, receives: Iterable[Operation]) -> None:
        """Withdraws waiting receives, and waits for arriving messages."""
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
                    await receive.ended()
        except TimeoutError:
            stuck = sum(not receive.done for receive in landing)
            log.warning("ucx_worker_replaced", reason="an arriving message did not finish", receives=stuck)
            self._down(PeerLost("The sender stopped in the middle of a message."))

    async def close(self) -> None:
        """Closes the UCX worker."""
        self._down(PeerLost("The transport was closed."))

    # Start and end of the UCX worker.
    def _listening(self) -> UcxWorker:
        """The UCX worker, a new one where UCX had no file for a peer and stopped listening."""
        if self._worker is not None and not self.guard.listens and self._can_open():
            log.warning("ucx_worker_replaced", reason="UCX had no file for a peer and stopped listening")
            self._down(PeerLost("UCX stopped listening, because too many files were open."))
            self.guard.occupy_closed()
        return self._up()

    def _up(self) -> UcxWorker:
        if self._worker is not None:
            return self._worker
        worker = self._context.start_worker(self.guard.listening())
        self.guard.require_found(self._context.lanes())
        self._worker, self._files = worker, SpareFiles()
        asyncio.get_running_loop().add_reader(worker.handle.epoll_file_descriptor, self._progress)
        if self.guard.is_active:
            self._sweeper = asyncio.create_task(self.guard.end_strangers(), name="strangers at UCX")
        self._schedule_poll()
        return worker

    def _down(self, reason: PdserveError) -> None:
        worker, self._worker = self._worker, None
        self._context.close()
        if worker is None:
            return
        asyncio.get_running_loop().remove_reader(worker.handle.epoll_file_descriptor)
        if self._sweeper is not None:
            self._sweeper.cancel()
        if self._files is not None:
            self._files.close()
            self._files = None
        if self._scheduled_poll is not None:
            self._scheduled_poll.cancel()
            self._scheduled_poll = None
        receives, _ = self._matcher.clear()
        operations = [*receives, *(request.operation for request in worker.requests)]
        for peer in worker.peers:
            peer.lost, peer.endpoint = True, None
        # UCX writes only while its worker exists and is polled: the buffers are safe once it is gone.
        worker.requests.clear()
        del worker
        if self._device_memory:
            # Copies queued on the GPU continue without it.
            import torch

            torch.cuda.synchronize()
        for operation in operations:
            operation.fail(reason)
        self._matcher.lose(reason)

    def _pause(self) -> None:
        """Stops polling UCX, which then neither sends nor reads."""
        self._is_paused = True
        if self._scheduled_poll is not None:
            self._scheduled_poll.cancel()
            self._scheduled_poll = None
        if self._worker is not None:
            asyncio.get_running_loop().remove_reader(self._worker.handle.epoll_file_descriptor)

    def _resume(self) -> None:
        self._is_paused = False
        if self._worker is not None:
            asyncio.get_running_loop().add_reader(self._worker.handle.epoll_file_descriptor, self._progress)
            self._schedule_poll()

    # Polling. Completed operations call back, and callbacks may post or disconnect.
    def _schedule_poll(self) -> None:
        if self._scheduled_poll is None and self._worker is not None and not self._is_paused:
            self._scheduled_poll = asyncio.get_running_loop().call_soon(self._progress)

    def _progress(self) -> None:
        if self._scheduled_poll is not None:
            self._scheduled_poll.cancel()
            self._scheduled_poll = None
        worker = self._worker
        if worker is None:
            return
        if not self._can_open():
            # UCX opens sockets for new peers, and ends the process when it gets none.
            self._pause()
            asyncio.get_running_loop().call_later(_NO_FILE_S, self._resume)
            return
        until = time.monotonic() + _SLICE_S
        while time.monotonic() < until:
            moved = worker.handle.progress_once()
            moved = self._take_arrivals(worker) or moved
            moved = worker.reap_oldest() or moved
            # Once armed, the descriptor wakes this process. A refusal means that something arrived in between.
            if not moved and not worker.reap_all() and worker.handle.arm():
                return
        worker.reap_all()
        self._schedule_poll()

    def _can_open(self) -> bool:
        return self._files is not None and self._files.can_open()

    def _take_arrivals(self, worker: UcxWorker) -> bool:
        moved = False
        while (message := worker.handle.tag_probe(*_ANY_TAG, remove=True)).matched:
            moved = True
            receive = self._matcher.arrive(message.sender_tag.value, message, message.length)
            if receive is not None:
                self._receive(worker, message, receive)
        return moved

    def _receive(self, worker: UcxWorker, message: ucx.TagProbeResult, receive: Operation) -> None:
        if message.length == receive.buffer.nbytes:
            worker.receive(message, receive)
        else:
            self._drain(message)
            receive.fail(
                TransferError(f"A message of {message.length} bytes came for a receive of {receive.buffer.nbytes}.")
            )

    def _drain(self, message: ucx.TagProbeResult) -> None:
        """Receives an unwanted message, so that its sender does not wait."""
        assert self._worker is not None, "messages come from an open UCX worker"
        if self._discarded is None:
            self._discarded = np.empty(_DISCARD_BYTES, np.uint8)
        self._worker.receive(message, Operation(0, self._discarded[: message.length]))
