"""Workers register in a real Redis and a router sees them, across restarts of either side."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace

import pytest

from pdserve.base.errors import StoreError
from pdserve.base.ids import Epoch, WorkerId
from pdserve.cli.private_redis import PrivateRedis
from pdserve.peers.registry import RECORD_TTL_S, WORKER_KEY, Registrar, WorkerDirectory, WorkerRecord, read_sightings
from pdserve.peers.seals import Refusal, Seals
from pdserve.peers.secret import parse_secret
from pdserve.peers.workers import SUSPICION_S
from pdserve.redis.store import Store
from tests.support.records import worker_record
from tests.support.redis import eventually, running, until

DECODE = WorkerId("decode-0")


def ids(directory: WorkerDirectory) -> list[str]:
    return [record.worker_id for record in directory.workers_of("decode")]


async def read_workers(store: Store) -> list[WorkerRecord]:
    records = [sighting.record for sighting in await read_sightings(store)]
    return sorted(records, key=lambda record: record.worker_id)


async def test_a_worker_is_listed_while_it_runs_and_removed_when_it_stops(
    worker_store: Store, router_store: Store
) -> None:
    directory = WorkerDirectory(router_store, refresh_s=0.02)
    async with running(directory.run()):
        async with running(Registrar(worker_store, worker_record).run()):
            await until(directory, lambda: ids(directory) == ["decode-0"])
            assert directory.get(DECODE) == worker_record()
            assert await read_workers(router_store) == [worker_record()]
        await until(directory, lambda: not ids(directory))
        assert await router_store.call("KEYS", "pd:*") == [b"pd:workers-mark"]


async def test_an_announced_change_does_not_wait_for_the_heartbeat(worker_store: Store, router_store: Store) -> None:
    current = worker_record(ready=False)
    registrar = Registrar(worker_store, lambda: current, heartbeat_s=3600)
    directory = WorkerDirectory(router_store, refresh_s=0.02)
    async with running(registrar.run(), directory.run()):
        await until(directory, lambda: directory.get(DECODE) == current)
        current = replace(current, ready=True)
        registrar.announce()
        await until(directory, lambda: directory.get(DECODE) == current)


async def test_readiness_does_not_wait_for_the_pause_after_a_heartbeat(
    worker_store: Store, router_store: Store
) -> None:
    current = worker_record()
    registrar = Registrar(worker_store, lambda: current, heartbeat_s=3600, pause_s=3600)
    directory = WorkerDirectory(router_store, refresh_s=0.02)
    async with running(registrar.run(), directory.run()):
        await until(directory, lambda: directory.get(DECODE) == current)
        registrar.announce_empty_queue()
        current = replace(current, ready=False)
        registrar.announce()
        await until(directory, lambda: directory.get(DECODE) == current)


async def test_heartbeats_carry_the_load_and_renew_the_expiry_of_the_record(
    worker_store: Store, router_store: Store
) -> None:
    # A record expires by the clock of Redis, perhaps before this process gets a processor for its next heartbeat.
    free_blocks = itertools.cycle(range(1000))
    registrar = Registrar(worker_store, lambda: worker_record(free_blocks=next(free_blocks)), heartbeat_s=0.02)
    directory = WorkerDirectory(router_store, refresh_s=0.02)
    async with running(registrar.run(), directory.run()):
        await until(directory, lambda: ids(directory) == ["decode-0"])
        first = directory.get(DECODE)
        await until(directory, lambda: directory.get(DECODE) not in (None, first))
        await eventually(lambda: _persisted(router_store))
        await eventually(lambda: _expires(router_store))


@pytest.mark.own_redis
async def test_known_workers_survive_a_redis_outage_and_register_again(
    redis_server: PrivateRedis, worker_store: Store, router_store: Store
) -> None:
    changes: list[bool] = []
    registrar = Registrar(worker_store, worker_record, heartbeat_s=0.05, retry_s=0.05, on_degraded=changes.append)
    directory = WorkerDirectory(router_store, refresh_s=0.02)
    async with running(registrar.run(), directory.run()):
        await until(directory, lambda: ids(directory) == ["decode-0"])
        await redis_server.stop(kill=True)
        await until(directory, lambda: directory.degraded)
        assert ids(directory) == ["decode-0"]
        await eventually(lambda: _is(registrar.degraded))
        await redis_server.start()
        seen_empty = []
        while directory.degraded:
            await directory.wait_for_change()
            seen_empty.append(not ids(directory))
        assert not any(seen_empty)
        await eventually(lambda: _is(not registrar.degraded))
        assert await read_workers(router_store) == [worker_record()]
        assert ids(directory) == ["decode-0"]
    assert changes == [True, False]
    assert registrar.failures > 0
    assert directory.failures > 0


@pytest.mark.own_redis
async def test_a_silent_restart_of_redis_does_not_empty_the_directory(
    redis_server: PrivateRedis, worker_store: Store, router_store: Store
) -> None:
    """Redis is back, empty, before the directory reads again, and the worker is slow to register."""
    directory = WorkerDirectory(router_store, refresh_s=0.02)
    async with running(Registrar(worker_store, worker_record, heartbeat_s=3600).run(), directory.run()):
        await until(directory, lambda: ids(directory) == ["decode-0"])
        before = directory.version
        await redis_server.restart()
        await until(directory, lambda: directory.version >= before + 2)  # degraded, and readable again
        assert not directory.degraded
        assert ids(directory) == ["decode-0"]
        assert await read_workers(router_store) == []


@pytest.mark.parametrize("others", [0, 1])
async def test_a_live_redis_that_is_emptied_ends_no_worker(
    worker_store: Store, router_store: Store, others: int
) -> None:
    """No connection fails. Workers are slow to register again, or one of them is back before the next read."""
    directory = WorkerDirectory(router_store, refresh_s=0.02)
    slow, quick = Registrar(worker_store, worker_record, heartbeat_s=3600), WorkerId("decode-1")
    back = Registrar(worker_store, lambda: worker_record(quick), heartbeat_s=3600)
    async with running(slow.run(), back.run(), directory.run()):
        await until(directory, lambda: ids(directory) == ["decode-0", "decode-1"])
        before, outages = directory.version, router_store.outages
        await worker_store.call("FLUSHALL")
        if others:
            back.announce()
        await until(directory, lambda: directory.version > before)
        assert ids(directory) == ["decode-0", "decode-1"]
        assert not directory.degraded
        assert router_store.outages == outages


async def test_a_killed_worker_is_excluded_at_once_and_its_successor_is_accepted(
    worker_store: Store, router_store: Store
) -> None:
    directory = WorkerDirectory(router_store, refresh_s=0.02)
    async with running(directory.run()):
        await _register_and_die(worker_store, worker_record(epoch=1))
        await until(directory, lambda: ids(directory) == ["decode-0"])
        directory.mark_lost(DECODE, Epoch(1))
        assert ids(directory) == []
        async with running(Registrar(router_store, lambda: worker_record(epoch=2)).run()):
            await until(directory, lambda: directory.get(DECODE) == worker_record(epoch=2))


async def test_a_worker_that_only_appeared_dead_returns_with_its_next_heartbeat(
    worker_store: Store, router_store: Store
) -> None:
    directory = WorkerDirectory(router_store, refresh_s=0.02)
    async with running(directory.run(), Registrar(worker_store, worker_record, heartbeat_s=0.05).run()):
        await until(directory, lambda: ids(directory) == ["decode-0"])
        directory.mark_lost(DECODE, Epoch(1))
        assert ids(directory) == []
        await until(directory, lambda: ids(directory) == ["decode-0"])
        directory.mark_lost(DECODE, Epoch(1))
        directory.mark_alive(DECODE, Epoch(1))
        assert ids(directory) == ["decode-0"]


@pytest.mark.own_redis
async def test_a_worker_that_appeared_dead_is_tried_again_after_seconds_while_redis_is_away(
    redis_server: PrivateRedis, worker_store: Store, router_store: Store
) -> None:
    now = [0.0]
    directory = WorkerDirectory(router_store, refresh_s=0.02, clock=lambda: now[0])
    async with running(directory.run(), Registrar(worker_store, worker_record).run()):
        await until(directory, lambda: ids(directory) == ["decode-0"])
        await redis_server.stop(kill=True)
        await until(directory, lambda: directory.degraded)
        directory.mark_lost(DECODE, Epoch(1))
        assert ids(directory) == []
        now[0] += SUSPICION_S
        await until(directory, lambda: ids(directory) == ["decode-0"])


async def test_a_stopping_worker_does_not_remove_its_successor(worker_store: Store, router_store: Store) -> None:
    first = asyncio.create_task(Registrar(worker_store, lambda: worker_record(epoch=1), heartbeat_s=3600).run())
    await eventually(lambda: _epoch_is(router_store, 1))
    async with running(Registrar(router_store, lambda: worker_record(epoch=2), heartbeat_s=3600).run()):
        await eventually(lambda: _epoch_is(router_store, 2))
        first.cancel()
        await asyncio.wait([first])
        assert [record.epoch for record in await read_workers(router_store)] == [2]


async def test_an_unreadable_record_hides_no_other(worker_store: Store, router_store: Store) -> None:
    await router_store.call("SADD", "pd:workers", "stranger")
    await router_store.call("HSET", router_store.key(WORKER_KEY + "stranger"), "beat", "1", "tier", "observer")
    async with running(Registrar(worker_store, worker_record).run()):
        await eventually(lambda: _has_workers(router_store, 1))
    await router_store.call("HSET", router_store.key(WORKER_KEY + "stranger"), "beat", "x")
    assert await read_workers(router_store) == []


async def test_ids_of_expired_records_are_removed(worker_store: Store) -> None:
    await worker_store.call("SADD", "pd:workers", "long-gone")
    assert await read_workers(worker_store) == []
    assert await worker_store.call("EXISTS", "pd:workers") == 0


async def _register_and_die(store: Store, record: WorkerRecord) -> None:
    """Leaves the record behind, as a killed process does. Closes the store."""
    task = asyncio.create_task(Registrar(store, lambda: record, heartbeat_s=3600).run())
    await eventually(lambda: _epoch_is(store, record.epoch))
    await store.close()
    task.cancel()
    await asyncio.wait([task])


async def _is(value: bool) -> bool:
    return value


async def _persisted(store: Store) -> bool:
    return await store.call("PERSIST", store.key(WORKER_KEY + DECODE)) == 1


async def _expires(store: Store) -> bool:
    ttl_ms = await store.call("PTTL", store.key(WORKER_KEY + DECODE))
    assert isinstance(ttl_ms, int)
    return 0 < ttl_ms <= RECORD_TTL_S * 1000


async def _has_workers(store: Store, count: int) -> bool:
    return len(await read_workers(store)) == count


async def _epoch_is(store: Store, epoch: int) -> bool:
    return [record.epoch for record in await read_workers(store)] == [epoch]


async def test_a_router_with_a_secret_sees_only_workers_that_have_it(worker_store: Store, router_store: Store) -> None:
    """A stranger who can write to Redis would have prompts sent to itself otherwise."""
    secret = parse_secret("the-secret-of-this-cluster", where="test")
    refused: list[Refusal] = []
    ours = Registrar(worker_store, lambda: worker_record("decode-0"), heartbeat_s=0.05)
    ours.secret = secret
    strange = Registrar(worker_store, lambda: worker_record("decode-1"), heartbeat_s=0.05)
    directory = WorkerDirectory(router_store, refresh_s=0.02, seals=Seals(secret, on_refused=refused.append))
    async with running(strange.run()):
        await eventually(lambda: _is_listed(router_store, "decode-1"))
        async with running(directory.run(), ours.run()):
            await until(directory, lambda: ids(directory) == ["decode-0"])
            assert ids(directory) == ["decode-0"]
    assert set(refused) == {Refusal.MISSING}


async def _is_listed(store: Store, worker_id: str) -> bool:
    return worker_id in [sighting.record.worker_id for sighting in await read_sightings(store)]


async def test_what_a_stranger_leaves_in_the_registry_hides_no_worker_and_ends_no_router(
    worker_store: Store, router_store: Store
) -> None:
    directory = WorkerDirectory(router_store, refresh_s=0.02)
    async with running(directory.run(), Registrar(worker_store, worker_record).run()):
        for name in (b"\xff\xfe", b"list", b"beat", b"large"):
            await worker_store.call("SADD", "pd:workers", name)
        await worker_store.call("HSET", b"pd:worker:\xff\xfe", "epoch", "1")
        await worker_store.call("RPUSH", "pd:worker:list", "x")
        await worker_store.call("HSET", "pd:worker:beat", "beat", "9" * 5000)
        await worker_store.call("HSET", "pd:worker:large", "transport", "[" * 100_000)
        await until(directory, lambda: ids(directory) == ["decode-0"])
        failures, version = directory.failures, directory.version
        assert [record.worker_id for record in await read_workers(router_store)] == ["decode-0"]
        assert (directory.failures, directory.version) == (failures, version)


@pytest.mark.parametrize(
    "command",
    [
        ("HSET", "pd:worker:decode-0", "epoch", b"\xff\xfe"),
        ("SET", "pd:worker:decode-0", "x"),
        ("SET", "pd:workers", "x"),
        ("SET", "pd:workers-mark", b"\xff" * 5000),
        ("RPUSH", "pd:workers-mark", "x"),
    ],
)
async def test_a_worker_registers_over_whatever_a_stranger_left(
    worker_store: Store, router_store: Store, command: tuple[str | bytes, ...]
) -> None:
    registrar = Registrar(worker_store, worker_record, heartbeat_s=0.02, pause_s=0.01)
    async with running(registrar.run()):
        await eventually(lambda: _is_registered(router_store))
        await worker_store.call("DEL", command[1])
        await worker_store.call(*command)
        await eventually(lambda: _is_registered(router_store))
        beats = registrar._beats
        await eventually(lambda: _has_beaten(registrar, beats + 2))
        assert registrar.failures == 0


async def _has_beaten(registrar: Registrar, beats: int) -> bool:
    return registrar._beats >= beats


async def _is_registered(store: Store) -> bool:
    try:
        return await read_workers(store) == [worker_record()]
    except StoreError:
        return False
