"""Workers that fail a request: other requests avoid lost workers, and a request that loses too many workers ends."""

from __future__ import annotations

import time

from pdserve.base.errors import PdserveError
from pdserve.peers.workers import WorkerRecord
from router_svc.generation import Generation
from router_svc.records.events import Retried, WorkerLost
from router_svc.records.journal import Journal
from router_svc.request.calls import is_gone, is_lost_in_call
from router_svc.request.placer import Placer
from router_svc.request.quarantine import REFUSED_S, Quarantine
from router_svc.routing.cluster import Cluster
from router_svc.routing.placement import Placement


class Losses:
    """The workers that one request has lost. Owned by its saga."""

    def __init__(
        self, generation: Generation, cluster: Cluster, journal: Journal, placer: Placer, quarantine: Quarantine
    ) -> None:
        self._generation = generation
        self._cluster = cluster
        self._journal = journal
        self._placer = placer
        self._quarantine = quarantine
        #: Workers lost, whatever ended them.
        self._count = 0
        #: Times that a decode worker has answered a call.
        self.decode_answers = 0

    def answered(self, worker: WorkerRecord) -> None:
        """The worker has answered a call: other requests may use it, even if it appeared to be gone."""
        self._cluster.directory.mark_alive(worker.worker_id, worker.epoch)
        self.decode_answers += worker.tier == "decode"

    def prefill_failed(self, placement: Placement, error: PdserveError) -> None:
        """A prefill worker has failed, and the next attempt starts."""
        self._placer.exclude_prefill(placement, error)
        self._journal.append(Retried.of(error, placement.worker))

    async def note(self, worker: WorkerRecord, error: PdserveError) -> None:
        """Makes other requests avoid a worker that cannot be reached, and counts it against this request.

        Raises the error for the client when the request has lost too many.
        """
        if not is_gone(error):
            return
        self._cluster.directory.mark_lost(worker.worker_id, worker.epoch)
        if not is_lost_in_call(error):
            return
        self._count += 1
        await self._count_death(worker)
        deaths = self._placer.deaths
        self._journal.append(WorkerLost(worker=worker.worker_id, remark=deaths.remark))
        last = f"The last was {worker.tier} worker {worker.worker_id}."
        if deaths.is_over:
            self._quarantine.add(self._generation, time.monotonic())
            raise PdserveError(
                f"The request has ended because {deaths.count} workers have failed by themselves while they "
                f"computed it. {last} The same request is refused for {REFUSED_S / 60:.0f} minutes. See the logs of "
                "these workers."
            ) from error
        limit = self._cluster.policy.max_lost_workers
        if self._count >= limit:
            raise PdserveError(
                f"The request has ended because it has lost {self._count} workers, which is the limit "
                f"(--max-lost-workers). {last} See what ends them, then send the request again."
            ) from error

    async def _count_death(self, worker: WorkerRecord) -> None:
        """Counts the death if the worker has named the request as one of the step in which it failed."""
        requests = await self._cluster.requests_of_death(worker.worker_id, worker.epoch)
        if requests is None or self._generation.worker_request_id not in requests:
            return
        deaths, name = self._placer.deaths, f"{worker.worker_id}:{worker.epoch}"
        after = deaths.after(worker.tier)
        self._placer.deaths = await self._quarantine.shared(self._generation, after, name, alone=deaths.is_alone)
