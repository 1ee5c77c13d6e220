"""A UCX worker with its peers and the requests in progress, as the UCX transport polls them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import ucxx._lib.libucxx as ucx
from ucxx._lib.arr import Array
from ucxx.exceptions import UCXError

from kvtransfer.transport.base import Operation, Peer
from kvtransfer.transport.ucx_address import pack_address
from kvtransfer.transport.ucx_lanes import lanes_of, protocol_of
from pdserve.base.errors import PeerLost


@dataclass(eq=False, slots=True)
class UcxPeer:
    """An endpoint to one UCX worker."""

    endpoint: ucx.UCXEndpoint | None
    lost: bool = False

    @property
    def closed(self) -> bool:
        """Disconnected, failed, or found dead by UCX."""
        return self.lost or self.endpoint is None or not self.endpoint.alive

    def lanes(self) -> tuple[str, ...]:
        """As `lanes_of`; empty when it is disconnected."""
        return () if self.endpoint is None or not self.endpoint.alive else lanes_of(self.endpoint.handle)

    def protocol(self, *, device_memory: bool) -> str:
        """As `protocol_of`; empty when it is disconnected."""
        if self.endpoint is None or not self.endpoint.alive:
            return ""
        return protocol_of(self.endpoint.handle, device_memory=device_memory)


def own_peer(peer: Peer) -> UcxPeer:
    """A peer that a UCX transport has connected."""
    assert isinstance(peer, UcxPeer), "a peer is used with the transport that connected it"
    return peer


@dataclass(eq=False, slots=True)
class _Request:
    """A request that UCX works on. It keeps the buffer alive as long as UCX may touch it."""

    handle: ucx.UCXRequest
    operation: Operation
    array: Array
    peer: UcxPeer | None = None

    def end(self) -> None:
        """Ends the operation of a completed request."""
        try:
            self.handle.check_error()
        except UCXError as error:
            if self.peer is not None:
                self.peer.lost = True
            self.operation.fail(PeerLost(f"UCX gave a message up: {error}."))
        else:
            self.operation.complete()


@dataclass(eq=False, slots=True)
class UcxWorker:
    """One UCX worker and everything that ends with it."""

    context: ucx.UCXContext
    handle: ucx.UCXWorker
    address: bytes
    #: Requests, oldest first; they complete nearly in order.
    requests: deque[_Request] = field(default_factory=deque)
    peers: list[UcxPeer] = field(default_factory=list)

    @classmethod
    def start(cls, context: ucx.UCXContext) -> UcxWorker:
        """A worker, which listens at once. Raises: UCXError."""
        handle = ucx.UCXWorker(context, enable_delayed_submission=False, enable_python_future=False)
        handle.init_blocking_progress_mode()
        return cls(context, handle, pack_address(handle.address.tobytes()))

    def send(self, peer: UcxPeer, send: Operation) -> None:
        """Starts a send. Raises: UCXError."""
        assert peer.endpoint is not None
        array = Array(send.buffer)
        handle = peer.endpoint.tag_send(array, ucx.UCXXTag(send.tag))
        self.requests.append(_Request(handle, send, array, peer))

    def receive(self, message: ucx.TagProbeResult, receive: Operation) -> None:
        """Starts to receive a message that was probed for."""
        array = Array(receive.buffer)
        self.requests.append(_Request(self.handle.tag_recv_with_handle(array, message), receive, array))

    def reap_oldest(self) -> bool:
        """Ends completed requests up to the first incomplete one: cheap enough for every poll."""
        reaped = False
        while self.requests and self.requests[0].handle.completed:
            reaped = True
            self.requests.popleft().end()
        return reaped

    def reap_all(self) -> bool:
        """Ends all completed requests, also those after requests to a peer that does not answer."""
        requests, self.requests = self.requests, deque()
        completed: list[_Request] = []
        for request in requests:
            (completed if request.handle.completed else self.requests).append(request)
        for request in completed:
            request.end()
        return bool(completed)
