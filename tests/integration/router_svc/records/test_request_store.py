"""Requests in a real Redis: written in the background and fenced by compare-and-set."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from dataclasses import replace

import pytest

from pdserve.base.errors import StaleAttempt, StoreError
from pdserve.base.ids import RequestId, WorkerId
from pdserve.cli.private_redis import PrivateRedis
from pdserve.redis.store import Argument, Reply, Store
from router_svc.records.recent_records import RecentRecords
from router_svc.records.request_state import RequestProgress, RequestState
from router_svc.records.request_store import REQUEST_KEY, RequestStore, StoredRequest
from router_svc.records.traces import Traces
from tests.support.redis import eventually, running

R = RequestId("request-1")


def new(request_id: str = "request-1") -> RequestProgress:
    return RequestProgress.new(RequestId(request_id), at=100.0)


def walk(progress: RequestProgress, *states: str) -> RequestProgress:
    for number, state in enumerate(states):
        progress = progress.advance(RequestState(state), at=101.0 + number)
    return progress


async def test_a_request_is_stored_with_its_history_and_record(router_store: Store) -> None:
    requests = RequestStore(router_store)
    walked = walk(new(), "reserved", "prefilling", "finished")
    progress = replace(walked, decode_worker=WorkerId("d"), prefill_worker=WorkerId("p"), outcome="stop")
    async with running(requests.run()):
        requests.put(progress, '{"why": "überlappt"}')
        await eventually(lambda: _is_kept(requests, progress))
    assert await requests.get(R) == StoredRequest(progress=progress, record='{"why": "überlappt"}')
    ttl_ms = await router_store.call("PTTL", router_store.key(REQUEST_KEY + R))
    assert isinstance(ttl_ms, int)
    assert 0 < ttl_ms <= 3600_000


async def test_an_unknown_request_is_none(router_store: Store) -> None:
    assert await RequestStore(router_store).get(R) is None


async def test_a_stale_attempt_is_refused(router_store: Store) -> None:
    requests = RequestStore(router_store)
    first = walk(new(), "reserved", "prefilling")
    await requests.write(first)
    second = walk(first, "retrying", "reserved")
    await requests.write(second)
    with pytest.raises(StaleAttempt, match=r"reserved:2 in Redis; decoding:1 may not overwrite"):
        await requests.write(walk(first, "decoding"))
    stored = await requests.get(R)
    assert stored is not None
    assert stored.progress == second


async def test_an_older_state_that_arrives_late_is_refused(router_store: Store) -> None:
    requests = RequestStore(router_store)
    reserved = walk(new(), "reserved")
    await requests.write(walk(reserved, "prefilling", "decoding"))
    with pytest.raises(StaleAttempt):
        await requests.write(reserved)


async def test_of_two_requests_with_one_id_the_later_one_is_kept(router_store: Store) -> None:
    requests = RequestStore(router_store)
    earlier = walk(new(), "reserved", "prefilling", "decoding", "finished")
    await requests.write(earlier)
    later = walk(RequestProgress.new(R, at=200.0), "reserved")
    await requests.write(later)
    with pytest.raises(StaleAttempt):
        await requests.write(earlier)
    await requests.write(walk(later, "prefilling"))
    stored = await requests.get(R)
    assert stored is not None
    assert stored.progress == walk(later, "prefilling")
    assert await requests.newest(5) == [R]


async def test_one_of_two_writers_of_the_same_request_wins(router_store: Store) -> None:
    requests = RequestStore(router_store)
    common = walk(new(), "reserved")
    await requests.write(common)
    await requests.write(walk(common, "retrying", "reserved", "decoding"))
    with pytest.raises(StaleAttempt):
        await requests.write(walk(common, "retrying", "failed"))


async def test_writing_the_same_state_again_updates_the_record(router_store: Store) -> None:
    requests = RequestStore(router_store)
    await requests.write(new(), "{}")
    await requests.write(new(), '{"more": 1}')
    stored = await requests.get(R)
    assert stored is not None
    assert stored.record == '{"more": 1}'


async def test_states_that_were_never_written_do_not_block_later_ones(router_store: Store) -> None:
    requests = RequestStore(router_store)
    await requests.write(new())
    later = walk(new(), "reserved", "retrying", "reserved", "decoding", "finished")
    await requests.write(later)
    stored = await requests.get(R)
    assert stored is not None
    assert stored.progress == later


async def test_a_refused_background_write_is_counted(router_store: Store) -> None:
    requests = RequestStore(router_store)
    await requests.write(walk(new(), "reserved", "decoding"))
    async with running(requests.run()):
        requests.put(walk(new(), "reserved"))
        await eventually(lambda: _is_idle(requests))
    assert requests.refused == 1
    assert requests.dropped == 0


@pytest.mark.own_redis
async def test_without_redis_writes_are_queued_up_to_a_limit_and_written_later(
    redis_server: PrivateRedis, router_store: Store
) -> None:
    requests = RequestStore(router_store, max_queued=3, retry_s=0.02)
    async with running(requests.run()):
        await redis_server.stop(kill=True)
        for number in range(5):
            requests.put(new(f"request-{number}"))
        final = walk(new("request-0"), "reserved", "decoding", "finished")
        requests.put(final)
        await eventually(lambda: _is_away(router_store))
        assert (requests.queued, requests.dropped) == (3, 2)
        with pytest.raises(StoreError):
            await requests.get(R)
        await redis_server.start()
        await eventually(lambda: _is_kept(requests, final))
        await eventually(lambda: _is_idle(requests))
        assert await requests.get(RequestId("request-2")) is not None
        assert await requests.get(RequestId("request-4")) is None
        # Redis has lost everything. Requests in progress continue all the same.
        await redis_server.restart()
        onward = walk(new("request-9"), "reserved")
        requests.put(onward)
        await eventually(lambda: _is_kept(requests, onward))


@pytest.mark.own_redis
async def test_a_state_put_while_an_older_one_is_being_written_is_not_lost(redis_server: PrivateRedis) -> None:
    assert redis_server.pid is not None
    writing = asyncio.Event()

    class WatchedStore(Store):
        async def pipeline(self, commands: Sequence[Sequence[Argument]], *, block_s: float = 0.0) -> list[Reply]:
            writing.set()
            return await super().pipeline(commands, block_s=block_s)

    async with WatchedStore(redis_server.url, timeout_s=10) as store:
        requests = RequestStore(store)
        async with running(requests.run()):
            os.kill(redis_server.pid, signal.SIGSTOP)
            requests.put(new())
            await writing.wait()
            later = walk(new(), "reserved")
            requests.put(later)
            os.kill(redis_server.pid, signal.SIGCONT)
            await eventually(lambda: _is_kept(requests, later))


async def test_queued_writes_are_written_at_the_end(router_store: Store) -> None:
    requests = RequestStore(router_store, batch_size=2)
    async with running(requests.run()):
        for number in range(5):
            requests.put(new(f"request-{number}"))
    assert requests.queued == 0
    assert await requests.get(RequestId("request-4")) is not None


async def test_only_the_newest_requests_are_kept(router_store: Store) -> None:
    requests = RequestStore(router_store, max_kept=3)
    for number in range(5):
        await requests.write(new(f"request-{number}"))
    await requests.write(walk(new("request-3"), "failed"))
    assert await requests.newest(10) == ["request-4", "request-3", "request-2"]
    assert await requests.newest(1) == ["request-4"]
    assert await requests.get(RequestId("request-1")) is None
    assert await router_store.call("KEYS", router_store.key(REQUEST_KEY + "request-1")) == []


async def test_a_record_that_cannot_be_parsed_is_a_store_error(router_store: Store) -> None:
    await router_store.call("HSET", router_store.key(REQUEST_KEY + R), "history", '[{"state": "dreaming"}]')
    with pytest.raises(StoreError, match="request-1"):
        await RequestStore(router_store).get(R)


async def _is_kept(requests: RequestStore, progress: RequestProgress) -> bool:
    try:
        stored = await requests.get(progress.request_id)
    except StoreError:
        return False
    return stored is not None and stored.progress == progress


async def _is_idle(requests: RequestStore) -> bool:
    return requests.queued == 0


async def _is_away(store: Store) -> bool:
    return not store.available


@pytest.mark.parametrize(
    "commands",
    [
        [("HSET", "pd:req:request-1", "mark", b"\xff\xfe", "accepted_at", "x")],
        [("HSET", "pd:req:request-1", "mark", "queued:1")],
        [("SET", "pd:req:request-1", "x")],
        [("SET", "pd:reqs", "x")],
    ],
)
async def test_a_request_is_written_over_whatever_a_stranger_left(
    router_store: Store, commands: list[tuple[str | bytes, ...]]
) -> None:
    for command in commands:
        await router_store.call(*command)
    requests = RequestStore(router_store)
    await requests.write(walk(new(), "reserved"))
    stored = await requests.get(R)
    assert stored is not None
    assert stored.progress == walk(new(), "reserved")


async def test_a_mark_that_is_no_text_refuses_that_request_and_no_other(router_store: Store) -> None:
    await router_store.call("HSET", "pd:req:request-1", "mark", b"\xff\xfe", "accepted_at", "100.0")
    requests = RequestStore(router_store)
    async with running(requests.run()):
        requests.put(new())
        requests.put(new("request-2"))
        await eventually(lambda: _is_kept(requests, new("request-2")))
    assert requests.refused == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("history", b"[]"),
        ("history", b"[" * 100_000),
        ("history", b'[{"state": "queued", "attempt": 1, "at": NaN}]'),
        ("history", b'[{"state": "queued", "attempt": Infinity, "at": 1}]'),
        ("outcome", b"\xff\xfe"),
        ("record", b"x" * 2_000_000),
    ],
)
async def test_a_stored_request_that_no_router_wrote_is_a_store_error(
    router_store: Store, field: str, value: bytes
) -> None:
    requests = RequestStore(router_store)
    await requests.write(new())
    await router_store.call("HSET", "pd:req:request-1", field, value)
    with pytest.raises(StoreError, match="request-1"):
        await requests.get(R)


@pytest.mark.parametrize("record", ["{", "[]", '{"at": NaN}', "[" * 100_000])
async def test_a_decision_record_that_no_router_wrote_is_a_store_error(router_store: Store, record: str) -> None:
    requests = RequestStore(router_store)
    await requests.write(new(), record)
    with pytest.raises(StoreError, match="request-1"):
        await Traces(RecentRecords(1), requests).get(R)
