"""Usage in a real Redis: routers add up, nothing is added twice or lost with an outage, and what is read is bounded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from datetime import date

import pytest

from pdserve.base.errors import StoreError, TooLarge
from pdserve.cli.private_redis import PrivateRedis
from pdserve.redis.store import Argument, Reply, Store
from router_svc.records import usage_store
from router_svc.records.usage import Account, Usage
from router_svc.records.usage_store import UsageStore
from tests.support.redis import eventually, running

#: 2026-11-23, noon.
NOON = 1795435200.0
DAY = date(2026, 11, 23)
A = Account(tenant="a", key_id="a-1", model="org/m:1")
B = Account(tenant="b", key_id="b-1", model="org/m:1")
ONE = Usage(requests=1, input_tokens=100, cached_tokens=40, output_tokens=7)


class Unreliable(Store):
    """A Redis that may be away, or do what it is asked and not confirm it."""

    is_away = False
    loses_replies = False

    async def pipeline(self, commands: Sequence[Sequence[Argument]], *, block_s: float = 0.0) -> list[Reply]:
        if self.is_away:
            raise StoreError("away")
        replies = await super().pipeline(commands, block_s=block_s)
        if self.loses_replies:
            raise StoreError("no answer")
        return replies


@pytest.fixture
async def store(redis_server: PrivateRedis) -> AsyncIterator[Unreliable]:
    async with Unreliable(redis_server.url, prefix="usage-test") as store:
        await store.call("FLUSHALL")
        yield store


def router(store: Store, **settings: int) -> UsageStore:
    return UsageStore(store, clock=lambda: NOON, **settings)


async def read(store: Store, tenant: str | None = None, first: date = DAY) -> dict[Account, Usage]:
    return {row.account: row.usage for row in await router(store).read(first, DAY, tenant)}


async def test_what_two_routers_count_is_added(store: Unreliable) -> None:
    for usage in (router(store), router(store)):
        for _ in range(2):
            usage.add(A, ONE)
            usage.add(B, Usage(requests=1))
            await usage.flush()
    assert await read(store) == {A: ONE + ONE + ONE + ONE, B: Usage(requests=4)}
    assert await read(store, tenant="b") == {B: Usage(requests=4)}
    ttl = await store.call("TTL", store.key("usage:2026-11-23"))
    assert ttl in range(399 * 86_400, 400 * 86_400 + 1)


async def test_a_batch_whose_reply_was_lost_counts_once(store: Unreliable) -> None:
    """Fails if a batch is taken anew for each try, or if the script does not compare sequences."""
    usage = router(store)
    usage.add(A, ONE)
    store.loses_replies = True
    for _ in range(3):
        await usage.flush()
        usage.add(A, ONE)
    store.loses_replies = False
    await usage.flush()
    assert await read(store) == {A: ONE + ONE + ONE + ONE}


async def test_a_batch_that_a_failover_lost_is_sent_again(store: Unreliable) -> None:
    usage = router(store)
    usage.add(A, ONE)
    store.loses_replies = True
    await usage.flush()
    store.loses_replies = False
    await store.call("FLUSHALL")
    await usage.flush()
    assert await read(store) == {A: ONE}


async def test_usage_waits_while_redis_is_away(store: Unreliable) -> None:
    usage = router(store, max_pending=1)
    store.is_away = True
    for account in (A, B, A):
        usage.add(account, ONE)
    await usage.flush()
    with pytest.raises(StoreError):
        await usage.read(DAY, DAY, None)
    usage.add(A, ONE)
    store.is_away = False
    await usage.flush()
    assert await read(store) == {A: ONE + ONE + ONE}
    dropped, _ = usage.counters()
    assert dropped.value() == 1


async def test_the_rest_is_added_when_the_router_ends(store: Unreliable) -> None:
    usage = router(store, flush_s=3600)
    usage.add(A, ONE)
    async with running(usage.run()):
        await asyncio.sleep(0)
        assert await read(store) == {}
    assert await read(store) == {A: ONE}


async def test_an_answer_is_bounded(store: Unreliable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage_store, "MAX_ROWS", 3)
    usage = router(store)
    for number in range(1200):
        usage.add(Account(tenant="a", key_id=f"k{number}", model="m" * 70), ONE)
    usage.add(B, ONE)
    await usage.flush()
    with pytest.raises(TooLarge, match="more than 3 rows"):
        await read(store)
    assert await read(store, tenant="b") == {B: ONE}
    monkeypatch.setattr(usage_store, "MAX_ROWS", 2000)
    assert len(await read(store)) == 1201


async def test_keys_beyond_the_rows_of_a_day_share_one_and_known_keys_keep_theirs(
    store: Unreliable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage_store, "MAX_DAY_ROWS", 3)
    usage = router(store)
    keys = [Account(tenant=f"t{number}", key_id="k", model="org/m:1") for number in range(6)]
    for account in (*keys, keys[0], keys[5]):
        usage.add(account, ONE)
        await usage.flush()
    # The mark of the router is one of the three.
    rest = Account(tenant="*", key_id="*", model="org/m:1")
    assert await read(store) == {keys[0]: ONE + ONE, keys[1]: ONE, rest: ONE + ONE + ONE + ONE + ONE}
    assert await read(store, tenant="t5") == {}


async def test_the_oldest_days_are_deleted_when_too_much_is_kept(
    store: Unreliable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if usage is kept for 400 days whatever it takes: it would fill Redis, which then refuses all writes."""
    monkeypatch.setattr(usage_store, "MAX_KEPT_ROWS", 7)
    now = NOON
    usage = UsageStore(store, clock=lambda: now, flush_s=0.001)
    days = [date.fromordinal(DAY.toordinal() - age) for age in (3, 2, 1, 0)]
    for day in days:
        now = NOON - (DAY - day).days * 86_400
        for account in (A, B):
            usage.add(account, ONE)
        await usage.flush()
    # Two rows a day, and the mark of the router.
    async with running(usage.run()):

        async def is_trimmed() -> bool:
            [_, dropped] = usage.counters()
            return dropped.value() == 2

        await eventually(is_trimmed)
    assert [bool(await usage.read(day, day, None)) for day in days] == [False, False, True, True]


async def test_what_strangers_write_there_is_no_usage(store: Unreliable) -> None:
    key = store.key("usage:2026-11-23")
    await store.call("SET", key, "x")
    usage = router(store)
    usage.add(A, ONE)
    await usage.flush()
    assert await read(store) == {A: ONE}
    for field, value in (("a:k:m", "1 2 3"), ("no-usage", "1 2 3 4"), ("a:k:m2", b"\xff"), ("a:k:m3", "9" * 400)):
        await store.call("HSET", key, field, value)
    assert await read(store) == {A: ONE}
    for value in ("inf 1 1 1", "1 2 3 4 5", "9" * 5000):
        await store.call("HSET", key, "a:a-1:org/m:1", value)
        usage.add(A, ONE)
        await usage.flush()
        assert await read(store) == {A: ONE}
