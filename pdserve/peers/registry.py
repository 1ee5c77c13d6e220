"""The registry of workers in Redis: the worker's heartbeat, and the router's directory.

`pd:worker:{id}` is a hash that expires when heartbeats end. `pd:workers` is the set of ids to look up. A change of the
random `pd:workers-mark` shows that Redis has lost its contents, which `FLUSHALL` removes without an outage.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable

from pdserve.base.changes import Changes
from pdserve.base.errors import PeerRefused, StoreError
from pdserve.base.ids import Epoch, WorkerId
from pdserve.base.logs import get_logger
from pdserve.base.tasks import run_to_completion
from pdserve.peers.record_fields import (
    beat_from_fields,
    record_from_fields,
    record_to_fields,
    require_small,
    worker_id_from,
)
from pdserve.peers.registry_scripts import LIST, REGISTER, REMOVE
from pdserve.peers.sealed_record import RecordChecks, sealed_record
from pdserve.peers.seals import Seals
from pdserve.peers.secret import ClusterSecret
from pdserve.peers.workers import (
    Sighting,
    Tier,
    WorkerLoad,
    WorkerRecord,
    WorkerView,
)
from pdserve.redis.store import Store, as_bytes, as_fields, as_list

__all__ = ["Registrar", "Tier", "WorkerDirectory", "WorkerLoad", "WorkerRecord", "read_sightings"]

log = get_logger(__name__)

WORKER_KEY = "worker:"
WORKERS_KEY = "workers"
MARK_KEY = "workers-mark"
_MARK_BYTES = 8
RECORD_TTL_S = 5.0


class Registrar:
    """Keeps a worker's record in the registry for as long as `run` runs."""

    def __init__(
        self,
        store: Store,
        current: Callable[[], WorkerRecord],
        *,
        heartbeat_s: float = 1.0,
        retry_s: float = 0.25,
        pause_s: float = 0.1,
        on_degraded: Callable[[bool], None] = lambda degraded: None,
    ) -> None:
        """`current` returns the record for each heartbeat. `on_degraded` is called with every change of `degraded`.

        A heartbeat that only reports an empty queue comes at least `pause_s` after the previous one.
        """
        self._store = store
        self._current = current
        self._heartbeat_s = heartbeat_s
        self._retry_s = retry_s
        self._pause_s = pause_s
        self._on_degraded = on_degraded
        #: The secret that signs the record; to be set before `run`.
        self.secret: ClusterSecret | None = None
        self._degraded = False
        self._due = asyncio.Event()
        self._due_at_once = asyncio.Event()
        self._beats = 0
        #: Number of heartbeats that did not reach Redis.
        self.failures = 0

    @property
    def degraded(self) -> bool:
        """Whether the last heartbeat failed, so that routers may not know of this worker."""
        return self._degraded

    def announce(self) -> None:
        """Makes the next heartbeat immediate, for a change of readiness."""
        self._due_at_once.set()
        self._due.set()

    def announce_empty_queue(self) -> None:
        """Makes the next heartbeat come soon. Heartbeats keep their pause, since this may happen after each prompt."""
        self._due.set()

    async def run(self) -> None:
        """Sends heartbeats until cancelled, then removes the record."""
        try:
            while True:
                self._due.clear()
                self._due_at_once.clear()
                # A heartbeat that is cut off may reach Redis after the removal, on a connection of its own.
                await run_to_completion(self._beat())
                period_s = self._retry_s if self._degraded else self._heartbeat_s
                pause_s = min(self._pause_s, period_s)
                await _wait(self._due_at_once, pause_s)
                await _wait(self._due, period_s - pause_s)
        finally:
            await self._remove()

    async def _beat(self) -> None:
        record = self._current()
        self._beats += 1
        fields = {**record_to_fields(record), "beat": str(self._beats)}
        fields = sealed_record(self.secret, record.worker_id, fields, now=time.time())
        try:
            before = await self._store.script(
                REGISTER,
                keys=[self._store.key(WORKER_KEY + record.worker_id), self._store.key(WORKERS_KEY)],
                arguments=[
                    int(RECORD_TTL_S * 1000),
                    record.worker_id,
                    *(text for field in fields.items() for text in field),
                ],
            )
        except StoreError as error:
            self.failures += 1
            self._set_degraded(True, reason=str(error))
            return
        self._set_degraded(False)
        if self._beats > 1 and before not in (b"", str(record.epoch).encode()):
            other_epoch = as_bytes(before)[:20].decode(errors="replace")
            log.warning("worker_id_taken", worker=record.worker_id, other_epoch=other_epoch)

    def _set_degraded(self, degraded: bool, *, reason: str = "") -> None:
        if degraded != self._degraded:
            self._degraded = degraded
            if degraded:
                log.warning("registration_failing", reason=reason)
            else:
                log.info("registered_again")
            self._on_degraded(degraded)

    async def _remove(self) -> None:
        record = self._current()
        try:
            await self._store.script(
                REMOVE,
                keys=[self._store.key(WORKER_KEY + record.worker_id), self._store.key(WORKERS_KEY)],
                arguments=[record.epoch, record.worker_id],
            )
        except StoreError as error:
            # The record expires by itself. Until then, routers find the worker draining or gone.
            log.warning("record_left_behind", worker=record.worker_id, reason=error)


class WorkerDirectory:
    """The router's view of all workers, kept up to date while `run` runs. Queries never wait."""

    def __init__(
        self,
        store: Store,
        *,
        refresh_s: float = 0.5,
        grace_s: float = RECORD_TTL_S,
        clock: Callable[[], float] = time.monotonic,
        seals: Seals | None = None,
    ) -> None:
        """`seals`: those of the cluster; records that are not sealed with its secret do not exist."""
        self._store = store
        self._checks = RecordChecks(seals or Seals())
        self._refresh_s = refresh_s
        self._clock = clock
        self._view = WorkerView(grace_s=grace_s)
        self._changes = Changes()
        self._outages = store.outages
        #: The mark of the contents that were read last.
        self._mark: bytes | None = None
        #: Number of failed reads of the registry.
        self.failures = 0

    @property
    def degraded(self) -> bool:
        """Whether the registry is unreadable, so that these are the last known workers."""
        return self._view.degraded

    @property
    def version(self) -> int:
        """Number of visible changes so far, to be passed to `wait_for_change`."""
        return self._changes.version

    def workers_of(self, tier: Tier) -> list[WorkerRecord]:
        """All workers of a tier that are not known to be lost, by id. Some may not be `ready`."""
        return self._view.workers_of(tier)

    def get(self, worker_id: WorkerId) -> WorkerRecord | None:
        """The worker, unless it is unknown or lost."""
        return self._view.get(worker_id)

    def mark_lost(self, worker_id: WorkerId, epoch: Epoch) -> None:
        """Excludes a worker that appears to be dead, until it returns with a new epoch or a newer heartbeat.

        While the registry is unreadable, the worker is excluded for some seconds. Then the next request tries it again.
        """
        if self._view.mark_lost(worker_id, epoch, now=self._clock()):
            log.warning("worker_lost", worker=worker_id, epoch=epoch)
            self._changes.bump()

    def mark_alive(self, worker_id: WorkerId, epoch: Epoch) -> None:
        """Reverts `mark_lost`: the worker answers a call."""
        if self._view.mark_alive(worker_id, epoch):
            log.info("worker_alive", worker=worker_id, epoch=epoch)
            self._changes.bump()

    def was_ready_within(self, tier: Tier, model: str, within_s: float) -> bool:
        """Whether a worker of the tier that serves the model was ready in the last seconds."""
        ready_at = self._view.ready_at(tier, model)
        return ready_at is not None and self._clock() - ready_at <= within_s

    async def wait_for_change(self, since: int | None = None) -> int:
        """Returns the version once it differs from `since`, which is by default the present one."""
        return await self._changes.wait(self.version if since is None else since)

    async def run(self) -> None:
        """Refreshes until cancelled."""
        while True:
            if await self._refresh():
                self._changes.bump()
            await asyncio.sleep(self._refresh_s)

    async def _refresh(self) -> bool:
        read_at = self._clock()
        try:
            mark, sightings = await _read(self._store, self._checks)
        except StoreError:
            self.failures += 1
            return self._view.registry_lost(now=self._clock())
        changed = False
        if self._store.outages != self._outages or self._mark not in (None, mark):
            # Between two reads, another user of the store met an outage, or Redis was emptied.
            self._outages = self._store.outages
            changed = self._view.registry_lost(now=read_at)
        self._mark = mark
        return self._view.apply(sightings, read_at=read_at) or changed


async def read_sightings(store: Store, checks: RecordChecks | None = None) -> list[Sighting]:
    """The readable records of all registered workers that `checks` accepts, unordered. Raises `StoreError`."""
    _, sightings = await _read(store, checks or RecordChecks(Seals()))
    return sightings


async def _read(store: Store, checks: RecordChecks) -> tuple[bytes, list[Sighting]]:
    """The mark of the registry's contents, and what `read_sightings` returns."""
    reply = await store.script(
        LIST,
        keys=[store.key(WORKERS_KEY), store.key(MARK_KEY)],
        arguments=[store.key(WORKER_KEY), secrets.token_hex(_MARK_BYTES)],
    )
    mark, workers = as_list(reply)
    sightings = []
    for entry in as_list(workers):
        worker_id, fields = as_list(entry)
        try:
            sightings.append(_sighting(worker_id_from(as_bytes(worker_id)), as_fields(fields), checks))
        except PeerRefused:
            continue  # Counted and logged by the checks.
        except StoreError as error:
            # One unreadable record, perhaps of another version, must not hide the other workers.
            log.warning("record_unreadable", reason=error)
    return as_bytes(mark), sightings


def _sighting(worker_id: WorkerId, fields: dict[str, bytes], checks: RecordChecks) -> Sighting:
    require_small(worker_id, fields)
    checks.require_signed(worker_id, fields)
    beat = beat_from_fields(worker_id, fields)
    sighting = Sighting(record=record_from_fields(worker_id, fields), beat=beat)
    checks.require_newest(sighting)
    return sighting


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    """Returns when the event is set or the timeout expires."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        pass
