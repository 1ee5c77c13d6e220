"""Watches which path blocks take to each peer: compares it with the expected one and reports the difference."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvtransfer.handover.ticket import Ticket
from kvtransfer.transport import LaneReporter, LocalTransports, Peer, Transport
from kvtransfer.transport.memory_access import memory_access
from kvtransfer.transport.path import DataEndpoint, TransportPath, excluded_paths, path_between
from pdserve.base.config import variable
from pdserve.base.ids import WorkerId
from pdserve.base.logs import get_logger
from pdserve.base.shared_memory import ShareableMemory
from pdserve.engine.gpu_identity import NO_GPU, GpuIdentity
from pdserve.peers.host_identity import own_host_identity
from pdserve.peers.workers import TransportReport
from pdserve.worker.serve.metrics import WorkerMetrics

log = get_logger(__name__)

#: Maximum number of peers whose paths are remembered, with a series each. The longest unused peer is forgotten first.
MAX_PEERS = 64
#: Interval of looking for connections that have ended, and how UCX sends over others.
_SWEEP_S = 2.0


@dataclass(frozen=True, slots=True)
class _Seen:
    peer: Peer
    path: TransportPath


class TransportPaths:
    """The paths of this worker's open connections. Belongs to the event loop.

    The sender of blocks knows the path, since its end of the connection chooses it; receivers know none.
    """

    def __init__(
        self,
        transport: Transport,
        metrics: WorkerMetrics,
        *,
        device_memory: bool,
        gpu: GpuIdentity = NO_GPU,
        memories: Sequence[ShareableMemory] = (),
    ) -> None:
        """`device_memory`: as in `DataEndpoint`. `gpu`: that which has the blocks.

        `memories`: those in which blocks are offered to processes of the host.
        """
        self._transport = transport
        self._gpu = gpu
        self._memories = memories
        self._metrics = metrics
        self._device_memory = device_memory
        self._own: DataEndpoint | None = None
        self._seen: dict[WorkerId, _Seen] = {}
        #: Called with the reason why a path is slower than expected, or None when none is.
        self.on_change: Callable[[str | None], None] = lambda reason: None

    def own_endpoint(self) -> DataEndpoint | None:
        """This worker's end, for its tickets; None with a transport that reports no lanes."""
        if self._own is None and isinstance(self._transport, LaneReporter):
            self._own = DataEndpoint(
                host=own_host_identity(),
                lanes=self._transport.offered_lanes(),
                device_memory=self._device_memory,
                excluded_paths=excluded_paths(variable("UCX_TLS")),
                local=self._transport.local_address if isinstance(self._transport, LocalTransports) else None,
                gpu=self._gpu.uuid,
                readable_gpus=self._gpu.readable,
                pins_host_memory=any(memory.is_pinned for memory in self._memories),
                is_readable=any(not memory.is_pinned for memory in self._memories),
            )
        return self._own

    def observe(self, ticket: Ticket, peer: Peer) -> None:
        """Looks at the connection that a transfer takes. Cheap for a known one."""
        before = self._seen.pop(ticket.worker_id, None)
        if before is not None and before.peer is peer:
            self._seen[ticket.worker_id] = before  # It is now the latest used one.
            return
        path = self.path_to(ticket, peer)
        if path is None:
            return
        self._seen[ticket.worker_id] = _Seen(peer, path)
        while len(self._seen) > MAX_PEERS:
            del self._seen[next(iter(self._seen))]
        if before is None or before.path != path:
            _log(ticket.worker_id, path)
        self._publish()

    async def run(self) -> None:
        """Looks at connections at intervals, until cancelled."""
        while True:
            await asyncio.sleep(_SWEEP_S)
            self.sweep()

    def sweep(self) -> None:
        """Forgets connections that have ended. UCX chooses how to send from a GPU's memory when it first does."""
        is_changed = False
        for worker_id, seen in [*self._seen.items()]:
            if seen.peer.closed:
                del self._seen[worker_id]
            elif not seen.path.protocol and (protocol := self._protocol(seen.peer)):
                self._seen[worker_id] = replace(seen, path=seen.path.with_protocol(protocol))
                _log(worker_id, self._seen[worker_id].path)
            else:
                continue
            is_changed = True
        if is_changed:
            self._publish()

    def report(self) -> TransportReport:
        """The paths as routers see them."""
        counts = Counter(seen.path.actual for seen in self._seen.values())
        return TransportReport(paths=dict(sorted(counts.items())), degraded=self._reason())

    def path_to(self, ticket: Ticket, peer: Peer, *, is_in_host_memory: bool = False) -> TransportPath | None:
        """The path of one connection; None when it is unknown. Changes nothing.

        `is_in_host_memory`: what is sent is there, and not where this worker's blocks are.
        """
        own, other = self.own_endpoint(), ticket.data_endpoint
        if own is None or other is None or not isinstance(self._transport, LaneReporter):
            return None
        if is_in_host_memory:
            own = own.with_host_memory()
        lanes = self._transport.lanes(peer)
        if not lanes:
            return None
        path = path_between(own, other, lanes, memory_access(own.host, other.host))
        return path.with_protocol(self._transport.protocol(peer, device_memory=own.device_memory))

    def _protocol(self, peer: Peer) -> str:
        """How blocks reach the peer; empty while it is unknown."""
        if not isinstance(self._transport, LaneReporter):
            return ""
        return self._transport.protocol(peer, device_memory=self._device_memory)

    def _reason(self) -> str | None:
        slow = [(worker_id, seen.path) for worker_id, seen in self._seen.items() if seen.path.is_degraded]
        if not slow:
            return None
        worker_id, path = slow[0]
        others = f" ({len(slow) - 1} more peers)" if len(slow) > 1 else ""
        return f"to {worker_id}{others}: {path.found}: {path.cause}. {path.remedy}"

    def _publish(self) -> None:
        self._metrics.set_transport_paths(
            {
                str(worker_id): (seen.path.expected, seen.path.actual, seen.path.is_degraded)
                for worker_id, seen in self._seen.items()
            }
        )
        self.on_change(self._reason())


def _log(worker_id: WorkerId, path: TransportPath) -> None:
    if path.is_degraded:
        log.warning(
            "transport_degraded",
            peer=worker_id,
            expected=path.expected,
            actual=path.actual,
            protocol=path.protocol,
            cause=path.cause,
            remedy=path.remedy,
        )
    else:
        log.info("transport_path", peer=worker_id, expected=path.expected, actual=path.actual, protocol=path.protocol)
