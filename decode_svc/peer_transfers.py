"""Blocks on their way between decode workers: those of requests that move, and copies."""

from __future__ import annotations

from collections.abc import Callable

from decode_svc.block_sender import BlockSender
from decode_svc.migration.source import MigrationSource
from decode_svc.replication.source import ReplicationSource
from decode_svc.replication.target import ReplicationTarget
from decode_svc.scheduler import DecodeScheduler
from decode_svc.session_events import SessionEvent
from kvtransfer.handover.receiver import Receiver
from pdserve.observe.metrics import CounterSource
from pdserve.worker.serve.inboxes import Inboxes
from pdserve.worker.serve.worker import Worker


class PeerTransfers:
    """What a decode worker exchanges with others of its tier. Belongs to the event loop."""

    def __init__(
        self,
        worker: Worker,
        scheduler: DecodeScheduler,
        inboxes: Inboxes[SessionEvent],
        receiver: Callable[[], Receiver],
        *,
        interval_s: float,
    ) -> None:
        """`interval_s`: interval of copying new blocks; 0: no copies. `receiver` is called once the service runs."""
        self._receiver = receiver
        self._sender = BlockSender(worker)
        self.migration = MigrationSource(worker, scheduler.migrating, self._sender)
        self.replication = ReplicationSource(worker, scheduler.replicas, self._sender, inboxes, interval_s=interval_s)
        self.copies = ReplicationTarget(worker, scheduler.replicas, receiver)
        worker.metrics.read(
            CounterSource(
                name="replica_blocks_used",
                text="Blocks of output that a continued request found here, and that were not computed again",
                value=lambda: scheduler.replicas.num_used,
            )
        )

    @property
    def receiver(self) -> Receiver:
        """What grants tickets to prefill workers and to other decode workers."""
        return self._receiver()

    async def close(self) -> None:
        """Closes the channels to other workers."""
        await self._sender.close()
