"""A worker's identity for as long as its process lives: a restarted worker is another one."""

from __future__ import annotations

from pdserve.base.ids import Epoch, WorkerId
from pdserve.peers.workers import WorkerRecord

Incarnation = tuple[WorkerId, Epoch]


def incarnation_of(worker: WorkerRecord) -> Incarnation:
    """The id and epoch of a worker."""
    return (worker.worker_id, worker.epoch)
