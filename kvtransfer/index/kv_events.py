"""A worker's side of the prefix index: publishes to Redis which blocks it can serve, in batches, in the background."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from kvtransfer.index.kv_log import MAX_BATCH, KvEventBatch, KvLog
from pdserve.base.errors import StoreError
from pdserve.base.ids import BlockHash, Epoch, WorkerId
from pdserve.base.logs import get_logger
from pdserve.base.tasks import run_to_completion
from pdserve.redis.store import Store

log = get_logger(__name__)


class Outbox:
    """Changes to be published: the difference between the blocks held and those published. Pure.

    Its size is bounded by the blocks held and published, so no change is ever dropped. A block that comes and goes
    between two writes costs nothing. After any doubt, everything can be published again.
    """

    def __init__(self) -> None:
        self._held: set[BlockHash] = set()
        #: Hashes to be added (True) or removed (False), oldest change first.
        self._pending: dict[BlockHash, bool] = {}
        self._reset_due = True

    @property
    def held(self) -> frozenset[BlockHash]:
        """Blocks that can be served."""
        return frozenset(self._held)

    @property
    def pending(self) -> int:
        """Number of hashes to be published."""
        return len(self._pending)

    @property
    def due(self) -> bool:
        """Whether there is something to publish."""
        return self._reset_due or bool(self._pending)

    def record(self, added: Iterable[BlockHash], removed: Iterable[BlockHash]) -> None:
        """Records a change. Adding a block that is held, or removing one that is not, changes nothing."""
        for block_hash in removed:
            if block_hash in self._held:
                self._held.discard(block_hash)
                self._change(block_hash, False)
        for block_hash in added:
            if block_hash not in self._held:
                self._held.add(block_hash)
                self._change(block_hash, True)

    def start_over(self) -> None:
        """Invalidates what was published: the next batch is a reset, and all blocks held follow."""
        self._reset_due = True
        self._pending = dict.fromkeys(self._held, True)

    def take(self, max_batches: int) -> list[KvEventBatch]:
        """The next batches, which count as published from now on."""
        batches: list[KvEventBatch] = []
        while self.due and len(batches) < max_batches:
            hashes = list(itertools.islice(self._pending, MAX_BATCH))
            changes = [(block_hash, self._pending.pop(block_hash)) for block_hash in hashes]
            batches.append(
                KvEventBatch(
                    reset=self._reset_due,
                    added=tuple(block_hash for block_hash, is_added in changes if is_added),
                    removed=tuple(block_hash for block_hash, is_added in changes if not is_added),
                )
            )
            self._reset_due = False
        return batches

    def _change(self, block_hash: BlockHash, is_added: bool) -> None:
        # A pending change in the other direction cancels this one.
        if self._pending.pop(block_hash, None) is None:
            self._pending[block_hash] = is_added


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishPolicy:
    """When a worker writes to Redis, and how much Redis keeps."""

    #: Time that changes wait for others, so that they share a batch.
    batch_s: float = 0.05
    #: Interval of writes without changes, which renew the TTL and check that Redis still has the blocks.
    keep_s: float = 1.0
    #: Time after a failed write before the next.
    retry_s: float = 0.25
    #: Time after which the blocks of a process that died expire.
    ttl_s: float = 30.0
    #: Batches that the stream keeps, approximately.
    max_entries: int = 4096


class KvEventPublisher:
    """Publishes one worker's blocks while `run` runs, and removes them at the end.

    Belongs to one event loop. After any trouble with Redis it starts over with everything the worker holds. It knows
    that from the changes alone: the cache of a new incarnation is empty.
    """

    #: Batches written in one round trip.
    _PIPELINE = 16

    def __init__(self, store: Store, worker_id: WorkerId, epoch: Epoch, policy: PublishPolicy | None = None) -> None:
        self._store = store
        self._policy = policy or PublishPolicy()
        self._log = KvLog(store, ttl_s=self._policy.ttl_s, max_entries=self._policy.max_entries)
        self._worker_id = worker_id
        self._epoch = epoch
        self._outbox = Outbox()
        self._due = asyncio.Event()
        self._outages = store.outages
        self._resyncs = 0
        self._degraded = False
        #: Number of failed writes.
        self.failures = 0

    @property
    def degraded(self) -> bool:
        """Whether Redis lacks the current blocks because the last write failed."""
        return self._degraded

    @property
    def resyncs(self) -> int:
        """Number of times that everything was published, the first time included."""
        return self._resyncs

    @property
    def pending(self) -> int:
        """Number of hashes that wait to be published."""
        return self._outbox.pending

    def publish(self, added: Iterable[BlockHash], removed: Iterable[BlockHash]) -> None:
        """Records which blocks can be served now and which no longer; a hash in both is added. Never waits."""
        self._outbox.record(added, removed)
        if self._outbox.due:
            self._due.set()

    async def run(self) -> None:
        """Publishes until cancelled, then removes this incarnation's blocks."""
        try:
            while True:
                try:
                    await self._flush()
                except StoreError as error:
                    self._fail(str(error))
                    await asyncio.sleep(self._policy.retry_s)
                else:
                    await self._wait_for_changes()
        finally:
            await self._withdraw()

    async def _flush(self) -> None:
        """Writes all that is due, or an empty batch to renew the TTL. Raises: StoreError."""
        if self._store.outages != self._outages:
            self._outages = self._store.outages
            self._outbox.start_over()
        while True:
            batches = self._outbox.take(self._PIPELINE) or [KvEventBatch()]
            if batches[0].reset:
                self._resyncs += 1
            # One that is cut off may reach Redis behind the withdrawal.
            written = await run_to_completion(self._log.write(self._worker_id, self._epoch, self._resyncs, batches))
            if not written:
                raise StoreError(
                    f"Redis does not have the blocks of worker {self._worker_id}; all of them are written again."
                )
            if not self._outbox.due:
                break
        if self._degraded:
            self._degraded = False
            log.info("kv_events_published_again", worker=self._worker_id, blocks=len(self._outbox.held))

    def _fail(self, reason: str) -> None:
        """Starts over: it is unknown how much of the last write arrived."""
        self.failures += 1
        self._outages = self._store.outages
        self._outbox.start_over()
        if not self._degraded:
            self._degraded = True
            log.warning("kv_events_not_published", worker=self._worker_id, reason=reason)

    async def _wait_for_changes(self) -> None:
        """Returns after collecting some changes, or when the TTL has to be renewed."""
        if not self._outbox.due:
            self._due.clear()
        try:
            async with asyncio.timeout(self._policy.keep_s):
                await self._due.wait()
        except TimeoutError:
            return
        await asyncio.sleep(self._policy.batch_s)

    async def _withdraw(self) -> None:
        try:
            await self._log.remove(self._worker_id, self._epoch)
        except StoreError as error:
            # The blocks expire on their own.
            log.warning("blocks_left_behind", worker=self._worker_id, reason=error)
