"""The record that each worker publishes about itself, and a router's view of all workers. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from pdserve.base.ids import Epoch, RouterId, WorkerId
from pdserve.base.layout import KvLayout

Tier = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoad:
    """Load of a worker at its last heartbeat."""

    #: Sequences in the running batch (decode), prompts being computed (prefill).
    running: int = 0
    #: Requests accepted and not started.
    waiting: int = 0
    #: Prompt tokens accepted and not computed yet.
    queued_tokens: int = 0
    #: Queued tokens of prompts that have no first token yet, by the router that sent them. None: the worker does not
    #: report them.
    queued_by_router: Mapping[RouterId, int] | None = None
    free_blocks: int = 0
    #: Measured rate of prompt tokens; None before the first prompt.
    prefill_tokens_per_s: float | None = None
    #: The same rate while sequences decode, within their ITL budget (decode tier).
    prefill_tokens_per_s_while_decoding: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportReport:
    """The paths that a worker's blocks take."""

    #: Number of connected peers, by path (cma, tcp, ...).
    paths: Mapping[str, int] = field(default_factory=dict)
    #: Why a path is slower than it should be, and what to do; None when none is.
    degraded: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRecord:
    """A worker's entry in the registry."""

    worker_id: WorkerId
    epoch: Epoch
    tier: Tier
    grpc_address: str
    http_address: str
    #: Address for requests (decode tier); empty for a tier that takes them over gRPC.
    stream_address: str
    #: The name clients use.
    model: str
    layout: KvLayout
    max_num_seqs: int
    max_model_len: int
    total_blocks: int
    pid: int
    #: False while loading and while draining.
    ready: bool
    #: Largest interval between two messages of a stream while the worker can compute; None: it may be silent.
    keep_alive_s: float | None = None
    #: Workers of equal layout and equal class compute equal bits. Empty: an older worker, which does not say.
    numerics_class: str = ""
    #: Whether it takes requests whose output has to match a grammar, or thinks within a budget.
    reads_grammars: bool = False
    #: Whether it asks other workers for their data addresses where their tickets have none.
    asks_for_addresses: bool = False
    #: What it knows of sampling parameters: `pdserve.base.sampling.SAMPLING_VERSION`.
    sampling_version: int = 0
    #: The tier in which a worker has started that can change its role; None: it has one role for life.
    home_tier: Tier | None = None
    load: WorkerLoad = WorkerLoad()
    transport: TransportReport = TransportReport()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """A record as read from the registry. `beat` counts the heartbeats of that incarnation."""

    record: WorkerRecord
    beat: int


#: Time for which a worker that appeared to be dead is excluded while no heartbeat can be read. It doubles each time.
SUSPICION_S, MAX_SUSPICION_S = 5.0, 60.0
#: Time for which a router remembers that a tier was ready.
_READY_KEPT_S = 3600.0


@dataclass(slots=True)
class _Suspicion:
    """This incarnation appeared to be dead at `since`. `beat`: the first heartbeat count read after that."""

    epoch: Epoch
    since: float
    #: How long it is excluded without a readable registry.
    lasts_s: float
    beat: int | None = None
    #: Whether the next request may try the worker, after a time without a readable registry.
    is_over: bool = False


class WorkerView:
    """The workers a router may use. Takes reads of the registry with their time, and answers without waiting.

    While the registry is unreadable, and for `grace_s` afterwards, known workers stay, for they may not have had time
    to register again.
    """

    def __init__(self, *, grace_s: float) -> None:
        self._grace_s = grace_s
        self._known: dict[WorkerId, WorkerRecord] = {}
        self._suspicions: dict[WorkerId, _Suspicion] = {}
        self._degraded = False
        self._keep_until = float("-inf")
        #: When a worker of a tier and a model was last known to be ready.
        self._ready_at: dict[tuple[Tier, str], float] = {}

    @property
    def degraded(self) -> bool:
        """Whether the registry is unreadable, so that these are the last known workers."""
        return self._degraded

    def workers_of(self, tier: Tier) -> list[WorkerRecord]:
        """All workers of a tier that are not known to be lost, ready or not, by id."""
        return sorted(
            (record for record in self._known.values() if record.tier == tier and not self._is_lost(record)),
            key=lambda record: record.worker_id,
        )

    def get(self, worker_id: WorkerId) -> WorkerRecord | None:
        """The worker, unless it is unknown or lost."""
        record = self._known.get(worker_id)
        return None if record is None or self._is_lost(record) else record

    def ready_at(self, tier: Tier, model: str) -> float | None:
        """When a worker of the tier that serves the model was last known to be ready; None: not in the last hour."""
        return self._ready_at.get((tier, model))

    def registry_lost(self, *, now: float) -> bool:
        """The registry is unreadable, or may have lost its contents. Returns whether anything visible changed.

        Call it again while this lasts. No heartbeat can refute a suspicion then, so each suspicion ends after seconds.
        """
        changed = not self._degraded
        self._degraded = True
        for suspicion in self._suspicions.values():
            if not suspicion.is_over and now >= suspicion.since + suspicion.lasts_s:
                suspicion.is_over = changed = True
        return changed

    def apply(self, sightings: Iterable[Sighting], *, read_at: float) -> bool:
        """Takes one complete read of the registry, started at `read_at`. Returns whether anything visible changed."""
        changed = self._degraded
        if self._degraded:
            self._degraded = False
            self._keep_until = read_at + self._grace_s
        seen = {sighting.record.worker_id: sighting for sighting in sightings}
        known = {worker_id: sighting.record for worker_id, sighting in seen.items()}
        if read_at < self._keep_until:
            known = self._known | known
        changed |= known != self._known
        self._known = known
        changed = self._clear_suspicions(seen, read_at) or changed
        self._note_ready(read_at)
        return changed

    def mark_lost(self, worker_id: WorkerId, epoch: Epoch, *, now: float) -> bool:
        """Excludes this incarnation until it proves to be alive. Returns False when it is not the known one.

        Its record proves nothing, since it outlives the worker by its TTL. A heartbeat written after `now` does.
        Without a readable registry, the exclusion lasts for some seconds.
        """
        record = self._known.get(worker_id)
        if record is None or record.epoch != epoch or self._is_lost(record):
            return False
        before = self._suspicions.get(worker_id)
        lasts_s = SUSPICION_S
        if before is not None and before.epoch == epoch:
            lasts_s = min(2 * before.lasts_s, MAX_SUSPICION_S)
        self._suspicions[worker_id] = _Suspicion(epoch, now, lasts_s)
        return True

    def mark_alive(self, worker_id: WorkerId, epoch: Epoch) -> bool:
        """Reverts `mark_lost`: the worker answered. Returns whether it was excluded."""
        suspicion = self._suspicions.get(worker_id)
        if suspicion is None or suspicion.epoch != epoch:
            return False
        del self._suspicions[worker_id]
        return not suspicion.is_over

    def _note_ready(self, now: float) -> None:
        ready = {(record.tier, record.model): now for record in self._known.values() if self._is_ready(record)}
        kept = {key: at for key, at in self._ready_at.items() if now - at < _READY_KEPT_S}
        self._ready_at = kept | ready

    def _is_ready(self, record: WorkerRecord) -> bool:
        return record.ready and not self._is_lost(record)

    def _is_lost(self, record: WorkerRecord) -> bool:
        suspicion = self._suspicions.get(record.worker_id)
        return suspicion is not None and suspicion.epoch == record.epoch and not suspicion.is_over

    def _clear_suspicions(self, seen: Mapping[WorkerId, Sighting], read_at: float) -> bool:
        cleared = [
            worker_id
            for worker_id, suspicion in self._suspicions.items()
            if worker_id not in self._known or _is_refuted(suspicion, seen.get(worker_id), read_at)
        ]
        ended = [self._suspicions.pop(worker_id) for worker_id in cleared]
        return any(not suspicion.is_over for suspicion in ended)


def _is_refuted(suspicion: _Suspicion, sighting: Sighting | None, read_at: float) -> bool:
    """Whether the worker is alive. Remembers the first beat read after the suspicion, for the next read."""
    if sighting is None:
        return False
    if sighting.record.epoch != suspicion.epoch:
        return True
    if read_at < suspicion.since:
        return False
    if suspicion.beat is None:
        suspicion.beat = sighting.beat
    return sighting.beat != suspicion.beat
