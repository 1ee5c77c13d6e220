"""Everything that uses Redis, running together while Redis fails and returns, and stopping cleanly at any point."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from kvtransfer.index.kv_events import KvEventPublisher, PublishPolicy
from kvtransfer.index.prefix_mirror import PrefixMirror
from pdserve.base.errors import StoreError
from pdserve.base.ids import BlockHash, RequestId
from pdserve.cli.private_redis import PrivateRedis
from pdserve.peers.registry import Registrar, WorkerDirectory
from pdserve.peers.workers import WorkerRecord
from pdserve.redis.store import Argument, Reply, Store
from router_svc.records.request_state import RequestProgress, RequestState
from router_svc.records.request_store import RequestStore
from tests.support.deadline import DEADLINE_S
from tests.support.records import block_hashes, worker_record
from tests.support.redis import eventually, running, until

WORKERS = [worker_record("decode-0", epoch=11), worker_record("decode-1", epoch=12)]
HASHES = block_hashes(60)


@dataclass(frozen=True)
class Worker:
    record: WorkerRecord
    publisher: KvEventPublisher
    truth: set[BlockHash]

    def change(self, rng: random.Random) -> None:
        added, removed = set(rng.sample(HASHES, 20)), set(rng.sample(HASHES, 20))
        self.publisher.publish(added, removed)
        self.truth.difference_update(removed)
        self.truth.update(added)


@dataclass(frozen=True)
class Cluster:
    workers: list[Worker]
    directory: WorkerDirectory
    mirror: PrefixMirror
    requests: RequestStore
    router_store: Store

    @property
    def known(self) -> list[str]:
        return [record.worker_id for record in self.directory.workers_of("decode")]

    def mirror_equals_truth(self) -> bool:
        return all(self.mirror.index.blocks_of(worker.record.worker_id) == worker.truth for worker in self.workers)


@asynccontextmanager
async def cluster(url: str, *, timeout_s: float = 0.5) -> AsyncIterator[Cluster]:
    """Two workers and a router, each with a store of its own, as in separate processes."""
    async with (
        Store(url, timeout_s=timeout_s) as first_store,
        Store(url, timeout_s=timeout_s) as second_store,
        Store(url, timeout_s=timeout_s) as router_store,
    ):
        workers, services = [], []
        for record, store in zip(WORKERS, (first_store, second_store), strict=True):
            publisher = KvEventPublisher(
                store, record.worker_id, record.epoch, PublishPolicy(batch_s=0.005, keep_s=0.05, retry_s=0.02)
            )
            registrar = Registrar(store, lambda record=record: record, heartbeat_s=0.05, retry_s=0.02)
            workers.append(Worker(record, publisher, set()))
            services += [publisher.run(), registrar.run()]
        directory = WorkerDirectory(router_store, refresh_s=0.02)
        mirror = PrefixMirror(router_store, block_s=0.05, retry_s=0.02, audit_s=0.2)
        requests = RequestStore(router_store, retry_s=0.02)
        services += [directory.run(), mirror.run(), requests.run()]
        async with running(*services):
            yield Cluster(workers, directory, mirror, requests, router_store)


@pytest.mark.own_redis
@pytest.mark.parametrize("seed", range(3))
async def test_everything_recovers_from_outages_of_redis(redis_server: PrivateRedis, seed: int) -> None:
    rng = random.Random(seed)
    ids = [record.worker_id for record in WORKERS]
    async with cluster(redis_server.url) as all_users:
        await until(all_users.directory, lambda: all_users.known == ids)
        for outage in range(3):
            for worker in all_users.workers:
                worker.change(rng)
            if rng.random() < 0.5:
                await until(all_users.mirror, all_users.mirror_equals_truth)
            await redis_server.stop(kill=rng.random() < 0.5)
            all_users.workers[0].change(rng)
            progress = RequestProgress.new(RequestId(f"request-{outage}"), at=float(outage))
            all_users.requests.put(progress)
            if rng.random() < 0.5:
                await until(all_users.directory, lambda: all_users.directory.degraded)
                await until(all_users.mirror, lambda: all_users.mirror.degraded)
            assert all_users.known == ids
            all_users.requests.put(progress.advance(RequestState.CANCELLED, at=outage + 1.0))
            await redis_server.start()
            await until(all_users.mirror, lambda: not all_users.mirror.degraded and all_users.mirror_equals_truth())
            await until(all_users.directory, lambda: not all_users.directory.degraded)
            assert all_users.known == ids
            await eventually(lambda number=outage: _is_cancelled(all_users.requests, f"request-{number}"))


@pytest.mark.own_redis
async def test_everything_stops_while_redis_is_gone(redis_server: PrivateRedis) -> None:
    """A fixture verifies that no task and no socket stays behind."""
    async with cluster(redis_server.url) as all_users:
        await until(all_users.directory, lambda: len(all_users.known) == 2)
        all_users.workers[0].publisher.publish(HASHES, [])
        all_users.requests.put(RequestProgress.new(RequestId("request"), at=0.0))
        await redis_server.stop(kill=True)
        await until(all_users.mirror, lambda: all_users.mirror.degraded)


@pytest.mark.own_redis
async def test_everything_stops_while_redis_hangs(redis_server: PrivateRedis) -> None:
    assert redis_server.pid is not None
    try:
        async with asyncio.timeout(DEADLINE_S), cluster(redis_server.url, timeout_s=0.2) as all_users:
            await until(all_users.directory, lambda: len(all_users.known) == 2)
            os.kill(redis_server.pid, signal.SIGSTOP)
            all_users.workers[0].publisher.publish(HASHES, [])
            await until(all_users.directory, lambda: all_users.directory.degraded)
            assert len(all_users.known) == 2
    finally:
        os.kill(redis_server.pid, signal.SIGCONT)


@pytest.mark.parametrize("num_calls", [0, 1, 4, 12])
async def test_services_that_are_cancelled_early_leave_no_keys(
    redis_server: PrivateRedis, monkeypatch: pytest.MonkeyPatch, num_calls: int
) -> None:
    """They are cancelled when this many calls to Redis have started, the last of which is then in flight."""
    started = asyncio.Semaphore(0)
    pipeline = Store.pipeline

    async def counted(self: Store, commands: Sequence[Sequence[Argument]], *, block_s: float = 0.0) -> list[Reply]:
        started.release()
        return await pipeline(self, commands, block_s=block_s)

    async with cluster(redis_server.url) as all_users:
        monkeypatch.setattr(Store, "pipeline", counted)
        all_users.workers[0].publisher.publish(HASHES, [])
        for _ in range(num_calls):
            await started.acquire()
    async with Store(redis_server.url) as store:
        assert await store.call("KEYS", "pd:worker:*") == []
        assert await store.call("KEYS", "pd:blocks:*") == []


async def _is_cancelled(requests: RequestStore, request_id: str) -> bool:
    try:
        stored = await requests.get(RequestId(request_id))
    except StoreError:
        return False
    return stored is not None and stored.progress.state is RequestState.CANCELLED
