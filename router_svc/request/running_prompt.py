"""What the steps of one prompt's way through the cluster share."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from pdserve.peers.workers import WorkerRecord
from pdserve.v1 import prefill_pb2
from router_svc.generation import Generation
from router_svc.records.events import PrefillProgressed
from router_svc.records.journal import Journal
from router_svc.request.delivery import Delivery
from router_svc.request.losses import Losses
from router_svc.request.output import Output
from router_svc.request.placer import Placer
from router_svc.request.worker_messages import WorkerMessages
from router_svc.routing.cluster import Cluster
from router_svc.routing.in_flight import QueuedPrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningPrompt:
    """The parts of one prompt's run. Each has a single subject; the saga puts them together."""

    generation: Generation
    cluster: Cluster
    journal: Journal
    output: Output
    delivery: Delivery
    #: Chooses the next worker.
    placer: Placer
    losses: Losses
    messages: WorkerMessages
    #: Where the prompt's uncached tokens are counted.
    queued: QueuedPrompt
    #: The call to the prefill worker that has handed the prompt over. It retains the blocks until the call ends.
    retained: AsyncExitStack = field(default_factory=AsyncExitStack)

    def progressed(self, worker: WorkerRecord, progress: prefill_pb2.PrefillProgress) -> None:
        """A prefill worker has reported its progress."""
        self.losses.answered(worker)
        if not progress.queued:
            self.journal.append(PrefillProgressed.of(progress))
