"""The load of a tier as a whole, and its course over the last minutes. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, fields

from pdserve.peers.workers import WorkerRecord
from router_svc.records.record_json import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class TierLoad:
    """Sums over the ready workers of a tier; `workers` counts all of them."""

    workers: int = 0
    ready: int = 0
    running: int = 0
    waiting: int = 0
    queued_tokens: int = 0
    total_blocks: int = 0
    free_blocks: int = 0
    max_num_seqs: int = 0

    @property
    def kv_use(self) -> float:
        """Share of the tier's KV blocks that are in use, 0 to 1."""
        return 1 - self.free_blocks / self.total_blocks if self.total_blocks else 0.0

    def as_json(self) -> dict[str, Json]:
        """The load as JSON."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def load_of(workers: Sequence[WorkerRecord]) -> TierLoad:
    """The load of a tier with these workers. What is not ready takes no requests, so only its number counts."""
    ready = [worker for worker in workers if worker.ready]
    return TierLoad(
        workers=len(workers),
        ready=len(ready),
        running=sum(worker.load.running for worker in ready),
        waiting=sum(worker.load.waiting for worker in ready),
        queued_tokens=sum(worker.load.queued_tokens for worker in ready),
        total_blocks=sum(worker.total_blocks for worker in ready),
        free_blocks=sum(worker.load.free_blocks for worker in ready),
        max_num_seqs=sum(worker.max_num_seqs for worker in ready),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSample:
    """The load of the whole cluster at one time."""

    #: Unix time.
    at: float
    #: Prompts admitted and not ended, and those in the router's queue.
    running: int
    queued: int
    #: Prompt tokens that prefill workers have accepted and not computed.
    prefill_queued_tokens: int
    #: Shares of KV blocks in use, 0 to 1.
    prefill_kv_use: float
    decode_kv_use: float
    #: Sequences that run and that wait on decode workers.
    decode_running: int
    decode_waiting: int

    def as_row(self) -> list[Json]:
        """The values in the order of `COLUMNS`."""
        return [round(getattr(self, name), 4) for name in COLUMNS]


#: Names of the values of a sample.
COLUMNS: tuple[str, ...] = tuple(field.name for field in fields(LoadSample))


class LoadHistory:
    """The latest samples, the oldest first."""

    def __init__(self, capacity: int) -> None:
        self._samples: deque[LoadSample] = deque(maxlen=capacity)

    def add(self, sample: LoadSample) -> None:
        """Keeps a sample, and drops the oldest one beyond the capacity."""
        self._samples.append(sample)

    def since(self, at: float) -> list[LoadSample]:
        """The samples that are not older than `at`."""
        return [sample for sample in self._samples if sample.at >= at]

    def as_json(self) -> dict[str, Json]:
        """Column names and rows."""
        return {"columns": [*COLUMNS], "rows": [sample.as_row() for sample in self._samples]}
