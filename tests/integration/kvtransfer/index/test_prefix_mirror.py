"""Publishers, Redis and mirrors: after any disturbance the mirror ends up equal to what the workers hold."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from kvtransfer.index.kv_events import KvEventPublisher, PublishPolicy
from kvtransfer.index.kv_log import BLOCKS_KEY, HEAD_KEY, MAX_BATCH, STREAM_KEY, KvEventBatch, KvLog, StreamPosition
from kvtransfer.index.prefix_index import KvEventKind
from kvtransfer.index.prefix_mirror import PrefixMirror
from pdserve.base.errors import StoreError
from pdserve.base.ids import BlockHash, Epoch, WorkerId
from pdserve.cli.private_redis import PrivateRedis
from pdserve.redis.store import Store
from tests.support.records import block_hashes
from tests.support.redis import eventually, running, until

A, B = WorkerId("a"), WorkerId("b")
FIRST = Epoch(1)


@dataclass
class Worker:
    """A publisher, and the blocks that its worker really holds."""

    store: Store
    worker_id: WorkerId
    epoch: Epoch = FIRST
    ttl_s: float = 30.0
    keep_s: float = 0.05
    truth: set[BlockHash] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.publisher = KvEventPublisher(
            self.store,
            self.worker_id,
            self.epoch,
            PublishPolicy(batch_s=0.005, retry_s=0.02, keep_s=self.keep_s, ttl_s=self.ttl_s),
        )

    def change(self, added: Sequence[BlockHash] = (), removed: Sequence[BlockHash] = ()) -> None:
        self.truth = (self.truth - set(removed)) | set(added)
        self.publisher.publish(added, removed)


def new_mirror(store: Store) -> PrefixMirror:
    return PrefixMirror(store, block_s=0.05, retry_s=0.02, audit_s=0.2)


def equals_truth(mirror: PrefixMirror, *workers: Worker) -> bool:
    return mirror.index.epochs() == {worker.worker_id: worker.epoch for worker in workers} and all(
        mirror.index.blocks_of(worker.worker_id) == worker.truth for worker in workers
    )


async def test_the_mirror_follows_what_workers_publish(worker_store: Store, router_store: Store) -> None:
    a, b, mirror = Worker(worker_store, A), Worker(worker_store, B), new_mirror(router_store)
    prompt = block_hashes(20)
    async with running(mirror.run(), a.publisher.run(), b.publisher.run()):
        a.change(prompt)
        b.change(prompt[:7])
        await until(mirror, lambda: equals_truth(mirror, a, b))
        assert mirror.overlap(prompt) == {A: 20, B: 7}
        a.change(removed=prompt[5:6])
        b.change(added=prompt[7:9], removed=block_hashes(3, start=500))
        await until(mirror, lambda: equals_truth(mirror, a, b))
        assert mirror.overlap(prompt) == {A: 5, B: 9}
        assert mirror.overlap([]) == {}
        assert (mirror.gaps, mirror.failures, mirror.degraded) == (0, 0, False)


async def test_a_router_that_starts_late_gets_everything(worker_store: Store, router_store: Store) -> None:
    a, b = Worker(worker_store, A), Worker(worker_store, B)
    a.change(block_hashes(3000))
    async with running(a.publisher.run(), b.publisher.run()):
        await eventually(lambda: _published(router_store, a, b))
        mirror = new_mirror(router_store)
        async with running(mirror.run()):
            await until(mirror, lambda: mirror.snapshots == 1)
            assert equals_truth(mirror, a, b)
            a.change(added=block_hashes(5, start=9000), removed=block_hashes(2))
            await until(mirror, lambda: equals_truth(mirror, a, b))
            assert mirror.snapshots == 1


async def test_the_stream_corrects_a_snapshot_taken_during_changes(worker_store: Store, router_store: Store) -> None:
    a, mirror = Worker(worker_store, A), new_mirror(router_store)
    async with running(a.publisher.run()):
        a.change(block_hashes(4000))
        await eventually(lambda: _published(router_store, a))
        async with running(mirror.run()):
            for number in range(40):
                a.change(
                    added=block_hashes(50, start=10_000 + 50 * number), removed=block_hashes(50, start=50 * number)
                )
                await asyncio.sleep(0)
            await until(mirror, lambda: equals_truth(mirror, a))


@pytest.mark.own_redis
async def test_lookups_continue_without_redis_and_the_mirror_catches_up_afterwards(
    redis_server: PrivateRedis, worker_store: Store, router_store: Store
) -> None:
    a, b, mirror = Worker(worker_store, A), Worker(worker_store, B), new_mirror(router_store)
    prompt = block_hashes(20)
    async with running(mirror.run(), a.publisher.run(), b.publisher.run()):
        a.change(prompt)
        await until(mirror, lambda: equals_truth(mirror, a, b))
        await redis_server.stop(kill=True)
        await until(mirror, lambda: mirror.degraded)
        b.change(prompt)
        a.change(removed=prompt[10:])
        assert mirror.overlap(prompt) == {A: 20}
        await eventually(lambda: _is_true(a.publisher.degraded and b.publisher.degraded))
        await redis_server.start()
        await until(mirror, lambda: equals_truth(mirror, a, b))
        await eventually(lambda: _published(router_store, a, b))
        assert mirror.overlap(prompt) == {A: 10, B: 20}
        assert not mirror.degraded
        assert not a.publisher.degraded
        assert a.publisher.resyncs > 1


@pytest.mark.own_redis
async def test_blocks_are_published_again_after_each_quick_restart_of_redis(
    redis_server: PrivateRedis, worker_store: Store, router_store: Store
) -> None:
    a, mirror = Worker(worker_store, A), new_mirror(router_store)
    async with running(mirror.run(), a.publisher.run()):
        a.change(block_hashes(2 * MAX_BATCH))
        for _ in range(3):
            await until(mirror, lambda: equals_truth(mirror, a))
            snapshots = mirror.snapshots
            await redis_server.restart()
            a.change(removed=block_hashes(1, start=mirror.snapshots))
            await until(mirror, lambda before=snapshots: mirror.snapshots > before and equals_truth(mirror, a))
        await eventually(lambda: _published(router_store, a))


async def test_blocks_are_published_again_after_redis_was_emptied(worker_store: Store, router_store: Store) -> None:
    a, mirror = Worker(worker_store, A), new_mirror(router_store)
    async with running(mirror.run(), a.publisher.run()):
        a.change(block_hashes(30))
        await until(mirror, lambda: equals_truth(mirror, a))
        snapshots = mirror.snapshots
        await router_store.call("FLUSHALL")
        await until(mirror, lambda: mirror.snapshots > snapshots and equals_truth(mirror, a))
        await eventually(lambda: _published(router_store, a))


@pytest.mark.own_redis
async def test_a_redis_that_comes_back_with_older_data_is_corrected(
    redis_server: PrivateRedis, worker_store: Store, router_store: Store
) -> None:
    """A Redis with snapshots: after its restart all keys exist, but without the last changes."""
    a, mirror = Worker(worker_store, A), new_mirror(router_store)
    async with running(mirror.run(), a.publisher.run()):
        a.change(block_hashes(10))
        await until(mirror, lambda: equals_truth(mirror, a))
        await router_store.call("SAVE", block_s=5)
        a.change(added=block_hashes(5, start=20), removed=block_hashes(5))
        await until(mirror, lambda: equals_truth(mirror, a))
        await redis_server.restart()
        await eventually(lambda: _published(router_store, a))
        await until(mirror, lambda: equals_truth(mirror, a) and not mirror.degraded)


@pytest.mark.own_redis
async def test_an_outage_seen_by_another_user_of_the_store_counts(
    redis_server: PrivateRedis, worker_store: Store, router_store: Store
) -> None:
    """The publisher's own next call succeeds, on a new connection to a Redis with older data."""
    a = Worker(worker_store, A, keep_s=3600)
    async with running(a.publisher.run()):
        a.change(block_hashes(10))
        await eventually(lambda: _published(router_store, a))
        await router_store.call("SAVE", block_s=5)
        a.change(removed=block_hashes(5))
        await eventually(lambda: _published(router_store, a))
        await redis_server.restart()
        with pytest.raises(StoreError):
            await worker_store.call("PING")
        a.change(added=block_hashes(1, start=20))
        await eventually(lambda: _published(router_store, a))


async def test_a_gap_in_the_stream_leads_to_a_new_snapshot(worker_store: Store, router_store: Store) -> None:
    """The mirror falls behind by more entries than the stream keeps."""
    log, mirror = KvLog(worker_store, max_entries=1), new_mirror(router_store)
    hashes = block_hashes(400)
    await log.write(A, Epoch(1), 1, [KvEventBatch(reset=True, added=tuple(hashes[:1]))])
    async with running(mirror.run()):
        await until(mirror, lambda: mirror.snapshots == 1)
        # One pipeline: when the mirror reads next, all but the last entries are trimmed.
        batches = [KvEventBatch(added=(block_hash,)) for block_hash in hashes[1:]]
        await log.write(A, Epoch(1), 1, batches)
        assert await router_store.call("XLEN", router_store.key(STREAM_KEY)) != len(hashes)
        await until(mirror, lambda: mirror.index.blocks_of(A) == set(hashes))
        await log.write(A, Epoch(1), 1, [KvEventBatch(removed=tuple(hashes[:1]))])
        await router_store.call("XTRIM", router_store.key(STREAM_KEY), "MAXLEN", 0)
        await log.write(A, Epoch(1), 1, [KvEventBatch(removed=tuple(hashes[1:2]))])
        await until(mirror, lambda: mirror.index.blocks_of(A) == set(hashes[2:]))
        assert mirror.gaps > 0
        assert mirror.snapshots == mirror.gaps + 1


async def test_a_redis_clock_that_went_back_over_a_restart_is_noticed(worker_store: Store, router_store: Store) -> None:
    """The new generation is below the old one, so that reading on from the old position would show nothing."""
    a, mirror = Worker(worker_store, A), new_mirror(router_store)
    async with running(mirror.run(), a.publisher.run()):
        a.change(block_hashes(10))
        await until(mirror, lambda: equals_truth(mirror, a))
        snapshots = mirror.snapshots
        await worker_store.pipeline(
            [["MULTI"], ["FLUSHALL"], ["HSET", router_store.key(HEAD_KEY), "generation", 5, "sequence", 0], ["EXEC"]]
        )
        await until(mirror, lambda: mirror.snapshots > snapshots and equals_truth(mirror, a))
        incarnations = await KvLog(router_store).incarnations()
        assert incarnations.position.generation == 5


async def test_a_restarted_worker_replaces_its_old_blocks(worker_store: Store, router_store: Store) -> None:
    old, mirror = Worker(worker_store, A, Epoch(1)), new_mirror(router_store)
    old.change(block_hashes(10))
    async with running(mirror.run()):
        await _publish_and_die(old, router_store)
        await until(mirror, lambda: equals_truth(mirror, old))
        new = Worker(router_store, A, Epoch(2))
        new.change(block_hashes(2, start=50))
        async with running(new.publisher.run()):
            await until(mirror, lambda: equals_truth(mirror, new))
            assert mirror.overlap(block_hashes(10)) == {}
            assert await router_store.call("EXISTS", router_store.key(f"{BLOCKS_KEY}a:1")) == 0
            # A late batch of the dead incarnation is refused.
            late = [KvEventBatch(added=tuple(block_hashes(1)))]
            assert not await KvLog(router_store).write(A, Epoch(1), 1, late)
            assert await router_store.call("EXISTS", router_store.key(f"{BLOCKS_KEY}a:1")) == 0


async def test_a_killed_workers_blocks_expire_everywhere(worker_store: Store, router_store: Store) -> None:
    killed, mirror = Worker(worker_store, A, ttl_s=0.3), new_mirror(router_store)
    killed.change(block_hashes(10))
    async with running(mirror.run()):
        await _publish_and_die(killed, router_store)
        await until(mirror, lambda: equals_truth(mirror, killed))
        await until(mirror, lambda: equals_truth(mirror))
        assert mirror.index.entries == 0


async def test_a_stopping_worker_removes_its_blocks_at_once(worker_store: Store, router_store: Store) -> None:
    a, mirror = Worker(worker_store, A), new_mirror(router_store)
    a.change(block_hashes(10))
    async with running(mirror.run()):
        async with running(a.publisher.run()):
            await until(mirror, lambda: equals_truth(mirror, a))
        await until(mirror, lambda: equals_truth(mirror))
    assert await router_store.call("KEYS", "pd:blocks:*") == []


async def test_expired_blocks_of_a_live_worker_are_published_again(worker_store: Store, router_store: Store) -> None:
    a, mirror = Worker(worker_store, A), new_mirror(router_store)
    a.change(block_hashes(10))
    async with running(mirror.run(), a.publisher.run()):
        await until(mirror, lambda: equals_truth(mirror, a))
        await router_store.call("DEL", router_store.key(f"{BLOCKS_KEY}a:1"))
        await eventually(lambda: _published(router_store, a))
        await until(mirror, lambda: equals_truth(mirror, a))
        assert a.publisher.resyncs == 2


async def test_a_change_of_a_set_that_expired_is_refused(worker_store: Store) -> None:
    """A partial set must not look complete."""
    log = KvLog(worker_store)
    await log.write(A, Epoch(1), 1, [KvEventBatch(reset=True, added=tuple(block_hashes(3)))])
    await worker_store.call("DEL", worker_store.key(f"{BLOCKS_KEY}a:1"))
    assert not await log.write(A, Epoch(1), 1, [KvEventBatch(added=tuple(block_hashes(1, start=7)))])
    assert await worker_store.call("EXISTS", worker_store.key(f"{BLOCKS_KEY}a:1")) == 0


async def test_a_reset_that_comes_late_does_not_undo_a_newer_one(worker_store: Store) -> None:
    log = KvLog(worker_store)
    newer, older = block_hashes(3), block_hashes(3, start=10)
    assert await log.write(A, Epoch(1), 2, [KvEventBatch(reset=True, added=tuple(newer))])
    assert not await log.write(A, Epoch(1), 1, [KvEventBatch(reset=True, added=tuple(older))])
    assert not await log.write(A, Epoch(1), 1, [KvEventBatch(added=tuple(older))])
    held = [block_hash async for page in log.hashes(A, Epoch(1)) for block_hash in page]
    assert sorted(held) == sorted(newer)


async def test_large_changes_are_split_into_bounded_entries(worker_store: Store, router_store: Store) -> None:
    a = Worker(worker_store, A)
    async with running(a.publisher.run()):
        a.change(block_hashes(10_000))
        await eventually(lambda: _published(router_store, a))
    entries = await KvLog(router_store).read(StreamPosition(), block_s=0.05, count=100)
    sizes = [len(event.added) + len(event.removed) for _, event in entries]
    assert max(sizes) == MAX_BATCH
    assert sum(sizes) == 10_000


async def test_the_stream_keeps_a_bounded_number_of_entries(worker_store: Store) -> None:
    log = KvLog(worker_store, max_entries=100)
    await log.write(A, Epoch(1), 1, [KvEventBatch(reset=True)])
    for start in range(0, 1000, 100):
        hashes = block_hashes(100, start=start)
        await log.write(A, Epoch(1), 1, [KvEventBatch(added=(block_hash,)) for block_hash in hashes])
    length = await worker_store.call("XLEN", worker_store.key(STREAM_KEY))
    assert isinstance(length, int)
    assert 100 <= length <= 300


async def test_changes_that_cancel_out_are_not_sent(worker_store: Store, router_store: Store) -> None:
    a = Worker(worker_store, A)
    async with running(a.publisher.run()):
        await eventually(lambda: _published(router_store, a))
        a.change(block_hashes(10))
        a.change(removed=block_hashes(10))
        assert a.publisher.pending == 0
        a.change(block_hashes(1, start=50))
        await eventually(lambda: _published(router_store, a))
    entries = await KvLog(router_store).read(StreamPosition(), block_s=0.05, count=100)
    assert [block_hash for _, event in entries for block_hash in event.added] == block_hashes(1, start=50)
    assert [event.kind for _, event in entries] == [KvEventKind.RESET, KvEventKind.DELTA, KvEventKind.GONE]


async def _publish_and_die(worker: Worker, observer: Store) -> None:
    """Publishes, then leaves everything behind as a killed process would. Closes the worker's store."""
    task = asyncio.create_task(worker.publisher.run())
    await eventually(lambda: _published(observer, worker))
    await worker.store.close()
    task.cancel()
    await asyncio.wait([task])


async def _published(store: Store, *workers: Worker) -> bool:
    """Whether the sets in Redis equal what the workers hold."""
    log = KvLog(store)
    try:
        epochs = (await log.incarnations()).epochs
        held = [
            {block_hash async for page in log.hashes(worker.worker_id, worker.epoch) for block_hash in page}
            for worker in workers
        ]
    except StoreError:
        return False
    return all(epochs.get(worker.worker_id) == worker.epoch for worker in workers) and held == [
        worker.truth for worker in workers
    ]


async def _is_true(value: bool) -> bool:
    return value


@pytest.mark.parametrize(
    "commands",
    [
        [("HSET", "pd:kv-workers", "a", "x")],
        [("HSET", "pd:kv-workers", b"\xff", "9" * 5000)],
        [("DEL", "pd:kv-workers"), ("SET", "pd:kv-workers", "x")],
        [("HSET", "pd:kv-head", "generation", "x")],
        [("HSET", "pd:kv-head", "sequence", "01")],
        [("DEL", "pd:kv-head"), ("SET", "pd:kv-head", "x")],
        [("DEL", "pd:kv-events"), ("SET", "pd:kv-events", "x")],
        [("XADD", "pd:kv-events", "9999999999999999999-1", "worker", "a")],
        [("XADD", "pd:kv-events", "9999999999999999999-7", "added", "x" * 16 * 513)],
        [("DEL", "pd:blocks:a:1"), ("SET", "pd:blocks:a:1", "x")],
        [("HSET", "pd:kv-workers", "c", "1 1"), ("SET", "pd:blocks:c:1", "x")],
    ],
)
async def test_worker_and_mirror_replace_what_a_stranger_left(
    worker_store: Store, router_store: Store, commands: list[tuple[str | bytes, ...]]
) -> None:
    a, mirror = Worker(worker_store, A), new_mirror(router_store)
    async with running(mirror.run(), a.publisher.run()):
        a.change(block_hashes(5))
        await until(mirror, lambda: equals_truth(mirror, a))
        for command in commands:
            await worker_store.call(*command)
        a.change(block_hashes(5, start=50))
        await until(mirror, lambda: mirror.index.blocks_of(A) == a.truth and not mirror.degraded)


async def test_heads_lost_in_quick_succession_have_generations_of_their_own(worker_store: Store) -> None:
    """A mirror that finds the position where it is sees no gap, and never learns what it has missed."""
    kv_log = KvLog(worker_store)
    positions = list[StreamPosition]()
    for resync in range(1, 51):
        assert await kv_log.write(A, FIRST, resync, [KvEventBatch(reset=True)])
        positions.append((await kv_log.incarnations()).position)
        await worker_store.call("DEL", worker_store.key(HEAD_KEY))
    assert len(set(positions)) == len(positions)


async def test_an_entry_that_leads_nowhere_does_not_make_the_mirror_spin(
    worker_store: Store, router_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without workers, only a pause ends the turns of snapshot and gap."""
    pauses = list[float]()
    sleep = asyncio.sleep

    async def noted(delay: float) -> None:
        pauses.append(delay)
        await sleep(delay)

    monkeypatch.setattr("kvtransfer.index.prefix_mirror.asyncio.sleep", noted)
    entry = ("worker", "a", "epoch", "1", "kind", "gone", "added", "", "removed", "")
    await worker_store.call("XADD", "pd:kv-events", "9999999999999999999-7", *entry)
    mirror = new_mirror(router_store)
    async with running(mirror.run()):
        await until(mirror, lambda: mirror.gaps >= 3)
    assert len([pause for pause in pauses if pause == 0.02]) >= 2
