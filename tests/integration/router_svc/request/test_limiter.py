"""Limits in a real Redis: shared by routers, given back by those that are lost, and kept alone without Redis."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence

import pytest

from pdserve.base.errors import QuotaExceeded, RateLimited, StoreError
from pdserve.cli.private_redis import PrivateRedis
from pdserve.redis.store import Argument, Reply, Store, as_bytes
from router_svc.request import limiter as limiter_module
from router_svc.request.client import Client
from router_svc.request.limit_scripts import RESERVE, SETTLE
from router_svc.request.limiter import Limiter
from router_svc.request.limits import Limits
from tests.support.redis import eventually, running


def client(name: str = "team", **limits: int) -> Client:
    return Client(id=name, tenant=name, limits=Limits(**limits))  # type: ignore[arg-type]


class Slow(Store):
    """A Redis that runs the scripts in `held`, and confirms them only when they are released."""

    held: tuple[str, ...] = ()

    def __init__(self, url: str, *, prefix: str) -> None:
        super().__init__(url, prefix=prefix)
        self.has_run = asyncio.Event()
        self.release = asyncio.Event()

    async def pipeline(self, commands: Sequence[Sequence[Argument]], *, block_s: float = 0.0) -> list[Reply]:
        replies = await super().pipeline(commands, block_s=block_s)
        if any(command[0] == "EVAL" and command[1] in self.held for command in commands):
            self.has_run.set()
            await self.release.wait()
        return replies


@pytest.fixture
async def store(redis_server: PrivateRedis) -> AsyncIterator[Slow]:
    async with Slow(redis_server.url, prefix="limits-test") as store:
        await store.call("FLUSHALL")
        yield store


async def settled(limiter: Limiter) -> None:
    while await limiter._settle_batch():
        pass


async def budget_used(store: Store, name: str = "team") -> int:
    return int(as_bytes(await store.call("HGET", store.key(f"limits:{name}"), "b")))


async def test_two_routers_share_a_limit(store: Store) -> None:
    one, two, key = Limiter(store), Limiter(store), client(requests_per_minute=2)
    await one.reserve(key, 1)
    await two.reserve(key, 1)
    for limiter in (one, two):
        with pytest.raises(RateLimited, match="2 requests per minute") as refused:
            await limiter.reserve(key, 1)
        assert 0 < refused.value.retry_after_s <= 30
    assert two.headers(key)["x-ratelimit-remaining-requests"] == "0"


async def test_what_a_request_did_not_use_is_given_back(store: Store) -> None:
    one, two, key = Limiter(store), Limiter(store), client(tokens_per_minute=1000)
    started_at = time.monotonic()
    reservation = await one.reserve(key, 900)
    with pytest.raises(RateLimited, match="tokens per minute"):
        await two.reserve(key, 900)
    one.settle(reservation, 50)
    await settled(one)
    await two.reserve(key, 900)
    gained = 1000 / 60 * (time.monotonic() - started_at)
    assert 50 <= int(two.headers(key)["x-ratelimit-remaining-tokens"]) <= 51 + gained


async def test_the_reservations_of_a_killed_router_end_with_their_leases(store: Store) -> None:
    key = client(parallel=1, tokens_per_minute=1000, budget=1000)
    killed, other = Limiter(store, lease_s=300), Limiter(store)
    await killed.reserve(key, 1000)

    async def is_free() -> bool:
        try:
            await other.reserve(key, 1000)
        except RateLimited:
            return False
        return True

    assert not await is_free()
    [lease] = killed._leases
    ends_at_ms = float(as_bytes(await store.call("ZSCORE", store.key("leases:team"), lease)))
    assert 0 < ends_at_ms / 1000 - time.time() <= 300
    await store.call("ZADD", store.key("leases:team"), ends_at_ms - 300_000, lease)
    assert await is_free()
    # Its tokens are back, too: all but those of the second request would be missing otherwise.
    state = await store.call("HGET", store.key("limits:team"), "b")
    assert as_bytes(state) == b"1000"


async def test_a_router_that_lives_keeps_its_leases(store: Store) -> None:
    key = client(parallel=1)
    limiter = Limiter(store, lease_s=60)
    await limiter.reserve(key, 1)
    await store.call("ZADD", store.key("leases:team"), 1, *limiter._leases)
    await limiter._renew()
    with pytest.raises(RateLimited, match="1 requests at a time"):
        await Limiter(store).reserve(key, 1)


async def test_the_next_request_may_run_where_one_has_just_ended(store: Store) -> None:
    limiter, key = Limiter(store), client(parallel=1)
    async with running(limiter.run()):
        for _ in range(3):
            limiter.settle(await limiter.reserve(key, 1), 1)


async def test_a_settlement_cut_off_before_its_reply_charges_each_tenant_once(store: Slow) -> None:
    """Fails if only an error of Redis, and not a cancellation, marks what may have been settled."""
    limiter = Limiter(store)
    for name in ("a", "b"):
        limiter.settle(await limiter.reserve(client(name, budget=10**6), 300), 100)
    store.held = (SETTLE,)
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(limiter.run())
        await store.has_run.wait()
        store.held = ()
        task.cancel()
    assert [await budget_used(store, name) for name in ("a", "b")] == [100, 100]


async def test_a_request_does_not_settle_others_by_itself_since_its_client_may_leave(store: Slow) -> None:
    """Fails if a request that waits for its predecessor sends the settlements: they would have no owner."""
    limiter, key = Limiter(store), client(parallel=1, budget=10**6)
    limiter.settle(await limiter.reserve(client("other", budget=10**6), 300), 100)
    limiter.settle(await limiter.reserve(key, 300), 100)
    store.held = (SETTLE,)
    async with asyncio.TaskGroup() as tasks:
        refused = tasks.create_task(limiter.reserve(key, 1))

        async def waits() -> bool:
            return store.has_run.is_set() or bool(limiter._unsettled[1].tried._waiters)

        await eventually(waits)
        assert not store.has_run.is_set()
        refused.cancel()
    store.held = ()
    await settled(limiter)
    assert [await budget_used(store, name) for name in ("team", "other")] == [100, 100]


@pytest.mark.parametrize("period", ["day", "month", "total"])
async def test_a_client_that_leaves_while_it_reserves_leaves_no_lease(store: Slow, period: str) -> None:
    """Fails if a reservation whose reply is not awaited is left to the end of its lease."""
    limiter, key = Limiter(store), client(parallel=1, tokens_per_minute=1000, budget=1000, budget_period=period)  # type: ignore[arg-type]
    store.held = (RESERVE,)
    async with asyncio.TaskGroup() as tasks:
        leaving = tasks.create_task(limiter.reserve(key, 900))
        await store.has_run.wait()
        assert await store.call("ZCARD", store.key("leases:team")) == 1
        leaving.cancel()
    store.held = ()
    async with running(limiter.run()):
        assert await limiter.reserve(key, 900) is not None
    assert await budget_used(store) == 900


async def test_what_redis_refuses_does_not_hold_up_the_others(store: Slow, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a refused batch is tried again before the others."""
    monkeypatch.setattr(limiter_module, "_BATCH", 1)
    limiter, broken, key = Limiter(store), client("broken", parallel=1), client(budget=10**6)
    reservations = [await limiter.reserve(broken, 10), await limiter.reserve(key, 10)]
    await store.call("SET", store.key("leases:broken"), "x")
    for reservation in reservations:
        limiter.settle(reservation, 3)
    for _ in range(2):
        await limiter._settle_batch()
    assert await budget_used(store) == 3


async def test_after_an_outage_all_that_waits_is_settled_in_batches(
    store: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a turn of the task sends all at once, or only the first batch."""
    monkeypatch.setattr(limiter_module, "_BATCH", 2)
    limiter, key = Limiter(store), client(budget=10**6)
    for reservation in [await limiter.reserve(key, 10) for _ in range(5)]:
        limiter.settle(reservation, 3)
    assert await limiter._settle_batch()
    assert len(limiter._unsettled) == 3
    async with running(limiter.run()):

        async def is_settled() -> bool:
            return await budget_used(store) == 15

        await eventually(is_settled)


async def test_a_budget_counts_what_was_used_and_ends_with_its_period(store: Store) -> None:
    key = client(budget=100)
    limiter = Limiter(store)
    limiter.settle(await limiter.reserve(key, 500), 99)
    await settled(limiter)
    limiter.settle(await limiter.reserve(key, 500), 20)
    await settled(limiter)
    with pytest.raises(QuotaExceeded, match="budget of 100 tokens per month") as refused:
        await limiter.reserve(key, 1)
    assert 0 < refused.value.retry_after_s <= 31 * 86400
    await store.call("HSET", store.key("limits:team"), "p", 0)
    await limiter.reserve(key, 1)


async def test_settling_twice_charges_once_and_a_lost_reservation_charges_all(store: Store) -> None:
    limiter, key = Limiter(store), client(budget=10**6)
    reservation = await limiter.reserve(key, 300)
    limiter.settle(reservation, 100)
    [settlement] = limiter._unsettled
    await settled(limiter)
    settlement.needs_lease = True
    limiter._unsettled.append(settlement)
    await settled(limiter)
    assert as_bytes(await store.call("HGET", store.key("limits:team"), "b")) == b"100"
    reservation = await limiter.reserve(key, 300)
    # A failover has lost the reservation.
    await store.call("DEL", store.key("leases:team"))
    await store.call("HSET", store.key("limits:team"), "b", 100)
    limiter.settle(reservation, 40)
    await settled(limiter)
    assert as_bytes(await store.call("HGET", store.key("limits:team"), "b")) == b"140"


async def test_without_redis_each_router_keeps_the_limit_alone_and_then_shares_it(
    redis_server: PrivateRedis,
) -> None:
    class Away(Store):
        is_away = False

        async def pipeline(self, *arguments: object, **more: object) -> list[object]:  # type: ignore[override]
            if self.is_away:
                raise StoreError("away")
            return await super().pipeline(*arguments, **more)  # type: ignore[arg-type, return-value]

    key = client(requests_per_minute=3, parallel=9)
    async with Away(redis_server.url) as away:
        limiter = Limiter(away)
        reservation = await limiter.reserve(key, 1)
        away.is_away = True
        limiter.settle(reservation, 1)
        await limiter.reserve(key, 1)
        await limiter.reserve(key, 1)
        with pytest.raises(RateLimited, match="3 requests per minute"):
            await limiter.reserve(key, 1)
        assert limiter.decided_alone == 3
        away.is_away = False
        # Redis has only seen the first.
        await limiter.reserve(key, 1)
        await limiter.reserve(key, 1)
        with pytest.raises(RateLimited):
            await limiter.reserve(key, 1)
        assert limiter.decided_alone == 3


async def test_a_key_without_limits_costs_no_call(store: Store) -> None:
    await store.close()
    limiter = Limiter(store)
    assert await limiter.reserve(Client(id="free"), 10**9) is None
    limiter.settle(None, 10**9)
    assert (limiter.headers(Client(id="free")), limiter.decided_alone) == ({}, 0)


async def test_what_strangers_write_there_costs_no_request(store: Store) -> None:
    await store.call("SET", store.key("limits:team"), "x")
    limiter = Limiter(store)
    assert await limiter.reserve(client(requests_per_minute=1), 1) is not None
    assert limiter.decided_alone == 1


async def test_no_settlement_is_dropped_below_the_bound(store: Store) -> None:
    limiter, key = Limiter(store), client(budget=10**6)
    reservations = [await limiter.reserve(key, 1)]
    limiter._unsettled.clear()
    limiter.settle(reservations[0], 1)
    limiter._unsettled.extend([limiter._unsettled[0]] * 5999)
    limiter.settle(await limiter.reserve(key, 1), 1)
    assert len(limiter._unsettled) == 6001
