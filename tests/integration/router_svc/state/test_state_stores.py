"""Both stores of state keep the protocol: who has claimed a record, and nothing is lost, mixed up or kept for ever."""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
import threading
import time
import zlib
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from pdserve.base.errors import SetupError, StoreError, TooLarge
from pdserve.cli.private_redis import DEFAULT_MEMORY_BYTES, PrivateRedis
from pdserve.peers.secret import ClusterSecret
from pdserve.redis.store import Store, as_bytes, as_list
from router_svc.records.stream_seal import StreamSeal
from router_svc.state import claim, memory_events
from router_svc.state.claim import claiming
from router_svc.state.directory_state import DirectoryState
from router_svc.state.opening import opened_state
from router_svc.state.redis_state import RedisState
from router_svc.state.state_store import MAX_RECORD_BYTES, EventBatch, Stage, StateStore
from tests.support.redis import eventually

KEY, OTHER = "0123456789abcdef:resp_1", "0123456789abcdef:resp_2"


@pytest.fixture(params=["redis", "directory"])
async def state(
    request: pytest.FixtureRequest, redis_server: PrivateRedis, tmp_path: Path
) -> AsyncIterator[StateStore]:
    url = redis_server.url if request.param == "redis" else f"file:{tmp_path}"
    async with opened_state(url, ttl_s=3600, prefix="pd", on_change=lambda reason: None) as opened:
        assert opened is not None
        yield opened


async def test_a_record_is_read_as_it_was_stored_and_gone_once_deleted(state: StateStore) -> None:
    assert await state.read(KEY) is None
    await state.create(KEY, b"\x00\xffrecord")
    assert await state.read(KEY) == b"\x00\xffrecord"
    assert await state.read(OTHER) is None
    assert await state.unclaimed() == []
    assert not await state.claim(KEY, "a")
    assert await state.delete(KEY)
    assert await state.read(KEY) is None
    assert not await state.delete(KEY)


async def test_only_the_holder_changes_an_open_record(state: StateStore) -> None:
    assert await state.create(KEY, b"1", holder="a")
    assert not await state.create(KEY, b"2", holder="b")
    assert await state.read(KEY) == b"1"
    assert await state.unclaimed() == []
    assert await state.claim(KEY, "a")
    assert not await state.claim(KEY, "b")
    assert not await state.update(KEY, b"2", "b", is_open=False)
    await state.release(KEY, "b")
    assert await state.unclaimed() == []
    assert await state.update(KEY, b"2", "a", is_open=True)
    await state.release(KEY, "a")
    assert await state.unclaimed() == [KEY]
    assert await state.claim(KEY, "b")
    # Whoever has lost it changes nothing any more.
    assert not await state.update(KEY, b"3", "a", is_open=False)
    assert await state.read(KEY) == b"2"
    assert await state.update(KEY, b"4", "b", is_open=False)
    assert await state.read(KEY) == b"4"
    assert await state.unclaimed() == []
    assert not await state.claim(KEY, "b")


async def test_a_deleted_record_is_not_stored_again_by_its_end(state: StateStore) -> None:
    await state.create(KEY, b"1", holder="a")
    await state.append(KEY, EventBatch(first=0, events=[b"x"]))
    assert await state.delete(KEY)
    assert not await state.update(KEY, b"2", "a", is_open=False)
    # Its router writes what it has left.
    await state.append(KEY, EventBatch(first=1, events=[b"y"]))
    assert await state.read(KEY) is None
    assert await state.unclaimed() == []
    assert await state.events(KEY, -1, wait_s=0.01) == []


async def test_a_group_lists_the_records_that_are_there_in_the_order_of_their_names(state: StateStore) -> None:
    keys = [f"0123-files:{number}" for number in (2, 10, 1)]
    for key in keys:
        await state.create(key, b"1", is_listed=True)
    await state.create("0123-other:1", b"1", is_listed=True)
    await state.create("9999-files:1", b"1", holder="a", is_listed=True)
    assert await state.listed("0123-files") == sorted(keys)
    assert await state.listed("9999-files") == ["9999-files:1"]
    await state.update("9999-files:1", b"2", "a", is_open=False)
    assert await state.listed("9999-files") == ["9999-files:1"]
    await state.delete(keys[0])
    assert await state.listed("0123-files") == sorted(keys[1:])
    assert await state.listed("nothing") == []


async def test_events_are_read_behind_any_number_and_those_made_again_are_not_added(state: StateStore) -> None:
    await state.create(KEY, b"1", holder="a")
    await state.append(KEY, EventBatch(first=0, events=[b"zero", b"one"]))
    await state.append(KEY, EventBatch(first=2, events=[b"two\x00"]))
    # Another router makes the same events again.
    await state.append(KEY, EventBatch(first=0, events=[b"zero", b"one"]))
    expected = [b"zero", b"one", b"two\x00"]
    for after in range(-1, 3):
        found = await state.events(KEY, after, wait_s=0.01)
        assert [event for batch in found for event in batch.events] == expected[after + 1 :]
        assert [batch.first for batch in found][:1] == ([after + 1] if after < 2 else [])
    assert await state.events(OTHER, -1, wait_s=0.01) == []


async def test_who_waits_for_events_gets_them_as_they_come(state: StateStore) -> None:
    await state.create(KEY, b"1", holder="a")
    waiting = asyncio.create_task(state.events(KEY, -1, wait_s=30))
    await asyncio.sleep(0)
    await state.append(KEY, EventBatch(first=0, events=[b"x"]))
    [batch] = await waiting
    assert (batch.first, list(batch.events)) == (0, [b"x"])


async def test_a_record_has_a_limit(state: StateStore) -> None:
    await state.create(OTHER, b"1", holder="a")
    too_large = bytes(MAX_RECORD_BYTES + 1)
    for write in (state.create(KEY, too_large), state.update(OTHER, too_large, "a", is_open=True)):
        with pytest.raises(TooLarge, match="more than may be stored"):
            await write
    assert await state.read(OTHER) == b"1"


async def test_a_claim_and_a_record_expire_in_redis(redis_server: PrivateRedis) -> None:
    async with Store(redis_server.url, prefix="pdstate") as store:
        await RedisState(store, ttl_s=100, seal=StreamSeal(None)).create(KEY, b"1", holder="a")
        record, claim = (store.key(f"{kind}:{KEY}") for kind in ("response", "claim"))
        assert 0 < int(await store.call("PTTL", record)) <= 100_000  # type: ignore[arg-type]
        assert 0 < int(await store.call("PTTL", claim)) <= 10_000  # type: ignore[arg-type]
        # One whose record has expired is no work for anybody.
        await store.call("DEL", record, claim)
        assert not await RedisState(store, ttl_s=100, seal=StreamSeal(None)).claim(KEY, "b")
        assert await RedisState(store, ttl_s=100, seal=StreamSeal(None)).unclaimed() == []


@pytest.mark.own_redis
async def test_a_full_redis_refuses_what_would_be_stored_before_it_is_made(redis_server: PrivateRedis) -> None:
    async with Store(redis_server.url, prefix="pdstate") as store:
        state = RedisState(store, ttl_s=100, seal=StreamSeal(None))
        await state.require_writable()
        await store.call("CONFIG", "SET", "maxmemory-policy", "noeviction")
        await store.call("CONFIG", "SET", "maxmemory", "1")
        with pytest.raises(StoreError, match="maxmemory"):
            await state.require_writable()
        assert await state.read(KEY) is None


async def test_a_full_disk_refuses_what_would_be_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = DirectoryState(tmp_path, ttl_s=100)
    await state.require_writable()
    free = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    with pytest.raises(StoreError, match="1000 bytes left"):
        await state.require_writable()
    state.close()


async def test_clusters_of_different_prefixes_share_nothing(redis_server: PrivateRedis) -> None:
    url = redis_server.url
    async with (
        opened_state(url, ttl_s=9, prefix="a", on_change=lambda reason: None) as one,
        opened_state(url, ttl_s=9, prefix="b", on_change=lambda reason: None) as other,
    ):
        assert one is not None
        assert other is not None
        await one.create(KEY, b"1", holder="x")
        await one.release(KEY, "x")
        assert await one.unclaimed() == [KEY]
        assert await other.unclaimed() == []
        assert await other.read(KEY) is None


async def test_a_directory_keeps_what_ran_for_the_next_router(tmp_path: Path) -> None:
    first = DirectoryState(tmp_path, ttl_s=3600)
    await first.create(KEY, b"1", holder="a")
    with pytest.raises(SetupError, match="another router uses"):
        DirectoryState(tmp_path, ttl_s=3600)
    first.close()
    second = DirectoryState(tmp_path, ttl_s=3600)
    assert await second.unclaimed() == [KEY]
    assert await second.claim(KEY, "b")
    assert await second.update(KEY, b"2", "b", is_open=False)
    second.close()


async def test_files_are_the_owners_alone_and_expire(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = DirectoryState(tmp_path / "deep" / "state", ttl_s=3600)
    for index in range(4):
        await state.create(f"k:{index}", bytes(10))
    paths = sorted((tmp_path / "deep" / "state").glob("k:*"))
    assert {stat.S_IMODE(path.stat().st_mode) for path in paths} == {0o600}
    assert stat.S_IMODE((tmp_path / "deep" / "state").stat().st_mode) == 0o700
    os.utime(paths[3], (0, 0))
    assert await state.read("k:3") is None
    for index, path in enumerate(paths[:3]):
        os.utime(path, (path.stat().st_atime, path.stat().st_mtime + index))
    state._max_bytes = 15
    await asyncio.to_thread(state._sweep)
    # One has expired, and the oldest of the others go until what is left is small enough.
    assert [path.name for path in sorted((tmp_path / "deep" / "state").glob("k:*"))] == [paths[2].name]
    monkeypatch.setattr(memory_events, "_MAX_LOGS", 2)
    for index in range(4):
        await state.create(f"k:{index}", b"1")
        await state.append(f"k:{index}", EventBatch(first=0, events=[b"x"]))
    assert [len(await state.events(f"k:{index}", -1, wait_s=0.01)) for index in (0, 3)] == [0, 1]
    state.close()


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("file:", "needs a directory"),
        ("file:///proc/none/state", "cannot be used"),
        ("postgres://x", "neither redis://"),
        ("redis://x:port", "."),
    ],
)
async def test_a_wrong_url_is_refused(url: str, text: str) -> None:
    with pytest.raises(SetupError, match=text):
        async with opened_state(url, ttl_s=1, prefix="pd", on_change=lambda reason: None):
            pass


async def test_events_in_redis_are_sealed_with_the_secret_of_the_cluster(redis_server: PrivateRedis) -> None:
    secret = ClusterSecret((b"a secret of this cluster",))
    text = b"event: response.created\ndata: a text"
    common: dict[str, Any] = {"ttl_s": 9, "prefix": "pd", "on_change": lambda reason: None}
    async with (
        opened_state(redis_server.url, secret=secret, **common) as ours,
        opened_state(redis_server.url, secret=ClusterSecret((b"the secret of others",)), **common) as theirs,
        Store(redis_server.url) as store,
    ):
        assert ours is not None
        assert theirs is not None
        await ours.create(KEY, b"1", holder="a")
        await ours.append(KEY, EventBatch(first=0, events=[text]))
        [key] = [as_bytes(key) for key in as_list(await store.call("KEYS", "*events*"))]
        stored = str(await store.call("XRANGE", key, "-", "+"))
        assert repr(zlib.compress(text + b"\n\n", 1))[2:-1] not in stored
        with pytest.raises(StoreError, match="not from this cluster"):
            await theirs.events(KEY, -1, wait_s=0.01)
        [batch] = await ours.events(KEY, -1, wait_s=0.01)
        assert batch.events == [text]


def test_a_directory_keeps_what_is_being_written_and_not_what_was_left(tmp_path: Path) -> None:
    fresh = tmp_path / "x.open.fresh"
    with closing(DirectoryState(tmp_path, ttl_s=9)) as state:
        fresh.touch()
        state._sweep()
        assert fresh.exists()
    with closing(DirectoryState(tmp_path, ttl_s=9)):
        assert not fresh.exists()


async def test_a_write_that_is_cancelled_ends_before_the_record_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that writes cannot be stopped, and would bring a deleted response back."""
    with closing(DirectoryState(tmp_path, ttl_s=9)) as state:
        await state.create(KEY, b"1", holder="a")
        goes_on = threading.Event()
        monkeypatch.setattr(os, "fsync", lambda _: goes_on.wait(30))
        writing = asyncio.create_task(state.update(KEY, b"2", "a", is_open=True))
        await asyncio.sleep(0)
        writing.cancel()
        deleting = asyncio.create_task(state.delete(KEY))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not writing.done()
        goes_on.set()
        with pytest.raises(asyncio.CancelledError):
            await writing
        assert await deleting
        assert await state.read(KEY) is None
        assert await state.unclaimed() == []
        assert os.listdir(tmp_path) == ["lock"]


async def test_of_those_who_create_a_record_at_once_one_has_it(state: StateStore) -> None:
    """Proxies send requests again, with their ids."""
    created = await asyncio.gather(*(state.create(KEY, b"by %b" % name, holder=name.decode()) for name in (b"a", b"b")))
    assert sorted(created) == [False, True]
    holder = "ab"[created.index(True)]
    assert await state.read(KEY) == f"by {holder}".encode()
    assert await state.claim(KEY, holder)


async def test_events_in_memory_have_a_limit_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_events, "_MAX_BYTES", 15)
    with closing(DirectoryState(tmp_path, ttl_s=9)) as state:
        for key in (KEY, OTHER):
            await state.create(key, b"1")
            await state.append(key, EventBatch(first=0, events=[bytes(10)]))
        assert [len(await state.events(key, -1, wait_s=0.01)) for key in (KEY, OTHER)] == [0, 1]


def test_a_record_that_a_lost_router_was_ending_has_ended(tmp_path: Path) -> None:
    with closing(DirectoryState(tmp_path, ttl_s=9)) as state:
        (tmp_path / f"{KEY}.open").write_bytes(b"1")
        (tmp_path / f"{KEY}.ended").write_bytes(b"2")
    with closing(DirectoryState(tmp_path, ttl_s=9)) as state:
        assert asyncio.run(state.unclaimed()) == []
        assert asyncio.run(state.read(KEY)) == b"2"


async def test_the_stage_of_a_record(state: StateStore) -> None:
    assert await state.stage(KEY) is Stage.GONE
    await state.create(KEY, b"1", holder="a")
    assert await state.stage(KEY) is Stage.CLAIMED
    await state.release(KEY, "a")
    assert await state.stage(KEY) is Stage.LEFT
    assert await state.claim(KEY, "b")
    await state.update(KEY, b"2", "b", is_open=False)
    assert await state.stage(KEY) is Stage.ENDED
    await state.delete(KEY)
    assert await state.stage(KEY) is Stage.GONE


async def test_a_record_without_a_holder_replaces_none_that_is_open(state: StateStore) -> None:
    """A request in the foreground may have the id of one that runs in the background."""
    await state.create(KEY, b"1", holder="a")
    assert not await state.create(KEY, b"2")
    assert await state.read(KEY) == b"1"
    assert await state.update(KEY, b"3", "a", is_open=False)
    assert await state.create(KEY, b"4")
    assert await state.read(KEY) == b"4"


async def test_a_record_that_was_deleted_for_good_is_not_stored_again(state: StateStore) -> None:
    for key in (KEY, OTHER):
        await state.create(key, b"1")
    await state.delete(KEY, for_good=True)
    await state.delete(OTHER)
    assert [await state.create(key, b"1", is_again=True) for key in (KEY, OTHER)] == [False, True]
    # A new request may have the id of an old one.
    assert await state.create(KEY, b"2")


async def test_a_directory_makes_room_as_it_is_written(tmp_path: Path) -> None:
    with closing(DirectoryState(tmp_path, ttl_s=9, max_bytes=25)) as state:
        await state.create("k:open", bytes(10), holder="a")
        for index in range(3):
            await state.create(f"k:{index}", bytes(10))
            os.utime(tmp_path / f"k:{index}.ended", (0, time.time() - 3 + index))
        assert await state.listed("k") == ["k:2", "k:open"]
        # One that is replaced counts once.
        await state.create("k:2", bytes(12))
        assert await state.listed("k") == ["k:2", "k:open"]
        assert state._used_bytes == 22


async def test_what_is_left_open_for_ever_is_deleted(tmp_path: Path) -> None:
    with closing(DirectoryState(tmp_path, ttl_s=9)) as state:
        for key in ("k:left", "k:claimed"):
            await state.create(key, b"1", holder="a")
            os.utime(tmp_path / f"{key}.open", (0, 0))
        await state.release("k:left", "a")
        await state._make_room()
        assert await state.listed("k") == ["k:claimed"]


async def test_a_claim_is_given_back_however_its_block_ends(state: StateStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim, "_RENEWAL_S", 0.01)
    await state.create(KEY, b"1", holder="a")
    await state.release(KEY, "a")
    for error in (RuntimeError, asyncio.CancelledError):
        with pytest.raises(error):
            async with claiming(state, KEY) as one, claiming(state, KEY) as other:
                assert await one.take()
                assert not await other.take()
                raise error
        assert await state.stage(KEY) is Stage.LEFT
    async with claiming(state, KEY) as one:
        assert await one.take()
        keeping = asyncio.create_task(one.keep())
        await state.delete(KEY)
        await asyncio.wait_for(keeping, 10)


async def test_the_memory_of_a_redis_is_measured_and_that_of_a_directory_is_not(
    redis_server: PrivateRedis, tmp_path: Path
) -> None:
    async with opened_state(redis_server.url, ttl_s=3600, prefix="pd", on_change=lambda reason: None) as state:
        assert state is not None
        used, limit = state.gauges()
        assert (used.name, used.value()) == ("state_memory_used_bytes", None)
        assert (limit.name, limit.value()) == ("state_memory_max_bytes", None)

        async def is_measured() -> bool:
            return limit.value() is not None

        running = asyncio.create_task(state.run())
        await eventually(is_measured)
        running.cancel()
        assert 100_000 < (used.value() or 0) < (limit.value() or 0)
        assert limit.value() == DEFAULT_MEMORY_BYTES
    async with opened_state(f"file:{tmp_path}", ttl_s=3600, prefix="pd", on_change=lambda reason: None) as state:
        assert state is not None
        assert list(state.gauges()) == []
