"""A router's copy of the prefix index: a snapshot from Redis, kept current by the stream of changes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from kvtransfer.index.kv_log import KvLog, StoredIncarnations, StreamPosition
from kvtransfer.index.prefix_index import KvEvent, KvEventKind, PrefixIndex
from pdserve.base.changes import Changes
from pdserve.base.errors import StoreError
from pdserve.base.ids import BlockHash, Epoch, WorkerId
from pdserve.base.logs import get_logger
from pdserve.observe.metrics import CounterSource
from pdserve.redis.store import Store

log = get_logger(__name__)


class PrefixMirror:
    """Looks up in memory how much of a prompt each worker holds; kept current while `run` runs.

    While Redis is unavailable the last known index stays: a wrong entry only makes a worker compute more. After any
    doubt (an outage, a gap in the stream) a new snapshot is taken, which replaces the index when it is complete.
    """

    def __init__(
        self,
        store: Store,
        *,
        block_s: float = 1.0,
        retry_s: float = 0.25,
        audit_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
        max_entries: int = 4_000_000,
    ) -> None:
        """Every `audit_s`, incarnations whose blocks expired in Redis (killed workers) are dropped here as well."""
        self._log = KvLog(store)
        self._block_s = block_s
        self._retry_s = retry_s
        self._audit_s = audit_s
        self._clock = clock
        self._max_entries = max_entries
        self._index = PrefixIndex(max_entries=max_entries)
        self._position = StreamPosition()
        self._changes = Changes()
        self._degraded = True
        #: Number of snapshots, and of gaps in the stream that made one necessary.
        self.snapshots = 0
        self.gaps = 0
        #: Number of failed reads.
        self.failures = 0

    @property
    def degraded(self) -> bool:
        """Whether the stream is not followed: before the first snapshot, and while Redis is unavailable."""
        return self._degraded

    @property
    def index(self) -> PrefixIndex:
        """The current index; a snapshot replaces it."""
        return self._index

    def counters(self) -> tuple[CounterSource, CounterSource]:
        """What went wrong, for metrics."""
        return (
            CounterSource(name="prefix_index_gaps", text="Gaps in the stream of KV events", value=lambda: self.gaps),
            CounterSource(
                name="prefix_index_failures",
                text="Failed reads of the prefix index",
                value=lambda: self.failures,
            ),
        )

    @property
    def version(self) -> int:
        """Number that grows with every change, for `wait_for_change`."""
        return self._changes.version

    def overlap(self, hashes: Sequence[BlockHash]) -> dict[WorkerId, int]:
        """Number of leading blocks that each worker holds; workers without the first are left out."""
        return self._index.overlap(hashes)

    def forget(self, worker_id: WorkerId, epoch: Epoch) -> None:
        """Drops an incarnation that is known to be dead."""
        self._index.forget(worker_id, epoch)
        self._changes.bump()

    async def wait_for_change(self, since: int | None = None) -> int:
        """Waits until the version differs from `since` (default: the current one) and returns it."""
        return await self._changes.wait(self.version if since is None else since)

    async def run(self) -> None:
        """Mirrors until cancelled."""
        while True:
            try:
                await self._snapshot()
                started_at = self._position
                await self._follow()
                if self._position == started_at:
                    # An entry that no worker of ours wrote: a snapshot does not lead past it, and is not repeated
                    # without end.
                    await asyncio.sleep(self._retry_s)
            except StoreError as error:
                self.failures += 1
                if not self._degraded:
                    log.warning("prefix_index_degraded", reason=error)
                self._degraded = True
                self._changes.bump()
                await asyncio.sleep(self._retry_s)

    async def _snapshot(self) -> None:
        """Builds a new index. Reads the stream's position first, so that concurrent changes are replayed on top."""
        incarnations = await self._log.incarnations()
        index = PrefixIndex(max_entries=self._max_entries)
        for worker_id, epoch in incarnations.epochs.items():
            index.apply(KvEvent(worker_id=worker_id, epoch=epoch, kind=KvEventKind.RESET))
            async for hashes in self._log.hashes(worker_id, epoch):
                index.apply(KvEvent(worker_id=worker_id, epoch=epoch, kind=KvEventKind.DELTA, added=hashes))
        self._index = index
        self._position = incarnations.position
        self._degraded = False
        self.snapshots += 1
        self._changes.bump()
        log.info("prefix_index_loaded", workers=len(incarnations.epochs), entries=index.entries)

    async def _follow(self) -> None:
        """Applies the stream until it has a gap."""
        audit_at = self._clock() + self._audit_s
        while True:
            entries = await self._log.read(self._position, block_s=self._block_s)
            for position, event in entries:
                if not self._position.precedes(position):
                    self._note_gap(position)
                    return
                self._index.apply(event)
                self._position = position
            if entries:
                self._changes.bump()
            if not entries or self._clock() >= audit_at:
                incarnations = await self._log.incarnations()
                if incarnations.position < self._position:
                    # Redis lost its data, and new entries have lower ids than those read, for its clock went back or
                    # there are none yet. Reading on would show no gap.
                    self._note_gap(incarnations.position)
                    return
                self._sweep(incarnations)
                audit_at = self._clock() + self._audit_s

    def _note_gap(self, position: StreamPosition) -> None:
        self.gaps += 1
        log.warning("prefix_stream_gap", last=self._position, next=position)

    def _sweep(self, incarnations: StoredIncarnations) -> None:
        """Drops incarnations that Redis no longer holds. New ones are added by their events in the stream."""
        for worker_id, epoch in self._index.epochs().items():
            if incarnations.epochs.get(worker_id) != epoch:
                self.forget(worker_id, epoch)
