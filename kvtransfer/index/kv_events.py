"""A worker's side of the prefix index: tells Redis which blocks it can serve, in batches and in the background."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable

from kvtransfer.index.kv_log import MAX_BATCH, KvEventBatch, KvLog
from pdserve.base.errors import StoreError
from pdserve.base.ids import BlockHash, Epoch, WorkerId
from pdserve.base.logs import get_logger
from pdserve.base.store import Store

log = get_logger(__name__)


class Outbox:
    """What Redis has yet to hear: the difference between the blocks held and those published. Pure.

    Its size is bounded by the blocks held and published; a block that comes and goes between two sendings costs
    nothing. So no event is ever dropped, and after any doubt everything can be said again.
    """

    def __init__(self) -> None:
        self._held: set[BlockHash] = set()
        # True: to be added, False: to be removed; the order of first mention.
        self._pending: dict[BlockHash, bool] = {}
        self._reset_due = True

    @property
    def held(self) -> frozenset[BlockHash]:
        """The blocks that can be served."""
        return frozenset(self._held)

    @property
    def pending(self) -> int:
        """Hashes to be sent."""
        return len(self._pending)

    @property
    def due(self) -> bool:
        """Whether there is something to be sent."""
        return self._reset_due or bool(self._pending)

    def record(self, added: Iterable[BlockHash], removed: Iterable[BlockHash]) -> None:
        """Takes a change. Adding what is held or removing what is not held changes nothing."""
        for block_hash in removed:
            if block_hash in self._held:
                self._held.discard(block_hash)
                self._change(block_hash, False)
        for block_hash in added:
            if block_hash not in self._held:
                self._held.add(block_hash)
                self._change(block_hash, True)

    def start_over(self) -> None:
        """Nothing sent so far counts: the next batch is a reset and all that is held follows."""
        self._reset_due = True
        self._pending = dict.fromkeys(self._held, True)

    def take(self, max_batches: int) -> list[KvEventBatch]:
        """The next batches, which now count as sent."""
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
        # The opposite still waits: together they are nothing.
        if self._pending.pop(block_hash, None) is None:
            self._pending[block_hash] = is_added


class KvEventPublisher:
    """Publishes one worker's blocks while `run` runs, and takes them back at the end.

    Belongs to one event loop. After any trouble with Redis it starts over with everything the worker holds, which it
    knows from the changes it was told: the cache of a new incarnation is empty.
    """

    #: Batches sent in one round trip.
    _PIPELINE = 16

    def __init__(
        self,
        store: Store,
        worker_id: WorkerId,
        epoch: Epoch,
        *,
        batch_s: float = 0.05,
        keep_s: float = 1.0,
        retry_s: float = 0.25,
        ttl_s: float = 30.0,
        max_entries: int = 4096,
    ) -> None:
        """Changes wait up to `batch_s` for others; without any, Redis is asked every `keep_s` if it has our blocks.

        They expire `ttl_s` after this process ends without a word.
        """
        self._store = store
        self._log = KvLog(store, ttl_s=ttl_s, max_entries=max_entries)
        self._worker_id = worker_id
        self._epoch = epoch
        self._batch_s = batch_s
        self._retry_s = retry_s
        self._keep_s = keep_s
        self._outbox = Outbox()
        self._due = asyncio.Event()
        self._outages = store.outages
        self._resyncs = 0
        self._degraded = False
        #: Attempts to write that Redis did not take.
        self.failures = 0

    @property
    def degraded(self) -> bool:
        """Whether Redis does not have the current blocks, because it did not take the last write."""
        return self._degraded

    @property
    def resyncs(self) -> int:
        """How often everything was published anew; the first time counts."""
        return self._resyncs

    @property
    def pending(self) -> int:
        """Hashes that wait to be sent."""
        return self._outbox.pending

    def publish(self, added: Iterable[BlockHash], removed: Iterable[BlockHash]) -> None:
        """Notes that blocks became servable or ceased to be; a hash in both counts as added. Never waits."""
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
                    await asyncio.sleep(self._retry_s)
                else:
                    await self._wait_for_changes()
        finally:
            await self._withdraw()

    async def _flush(self) -> None:
        """Sends all that is due, or a sign of life. Raises `StoreError`."""
        if self._store.outages != self._outages:
            self._outages = self._store.outages
            self._outbox.start_over()
        while True:
            batches = self._outbox.take(self._PIPELINE) or [KvEventBatch()]
            if batches[0].reset:
                self._resyncs += 1
            if not await self._log.write(self._worker_id, self._epoch, self._resyncs, batches):
                raise StoreError(f"Redis does not have the blocks of worker {self._worker_id}: sending all of them.")
            if not self._outbox.due:
                break
        if self._degraded:
            self._degraded = False
            log.info("kv_events_published_again", worker=self._worker_id, blocks=len(self._outbox.held))

    def _fail(self, reason: str) -> None:
        """Whether the last write arrived is unknown, so the next one says everything."""
        self.failures += 1
        self._outages = self._store.outages
        self._outbox.start_over()
        if not self._degraded:
            self._degraded = True
            log.warning("kv_events_not_published", worker=self._worker_id, reason=reason)

    async def _wait_for_changes(self) -> None:
        """Returns with some changes collected, or when a sign of life is due."""
        if not self._outbox.due:
            self._due.clear()
        try:
            async with asyncio.timeout(self._keep_s):
                await self._due.wait()
        except TimeoutError:
            return
        await asyncio.sleep(self._batch_s)

    async def _withdraw(self) -> None:
        try:
            await self._log.remove(self._worker_id, self._epoch)
        except StoreError as error:
            # They expire by themselves.
            log.warning("blocks_left_behind", worker=self._worker_id, reason=error)
