"""Limits in a real Redis: shared by routers, given back by those that are lost, and kept alone without Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from pdserve.base.errors import QuotaExceeded, RateLimited, StoreError
from pdserve.base.store import Store, as_bytes
from pdserve.cli.private_redis import PrivateRedis
from router_svc.request.client import Client
from router_svc.request.limiter import Limiter
from router_svc.request.limits import Limits
from tests.support.redis import eventually, redis_server

__all__ = ["redis_server"]


def client(**limits: int) -> Client:
    return Client(id="team", tenant="team", limits=Limits(**limits))  # type: ignore[arg-type]


@pytest.fixture
async def store(redis_server: PrivateRedis) -> AsyncIterator[Store]:
    async with Store(redis_server.url, prefix="limits-test") as store:
        await store.call("FLUSHALL")
        yield store


async def settled(limiter: Limiter) -> None:
    await limiter._settle_all()


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
    reservation = await one.reserve(key, 900)
    with pytest.raises(RateLimited, match="tokens per minute"):
        await two.reserve(key, 900)
    one.settle(reservation, 50)
    await settled(one)
    await two.reserve(key, 900)
    assert int(two.headers(key)["x-ratelimit-remaining-tokens"]) in range(50, 60)


async def test_the_reservations_of_a_killed_router_end_with_their_leases(store: Store) -> None:
    key = client(parallel=1, tokens_per_minute=1000, budget=1000)
    killed, other = Limiter(store, lease_s=0.5), Limiter(store)
    await killed.reserve(key, 1000)

    async def is_free() -> bool:
        try:
            await other.reserve(key, 1000)
        except RateLimited:
            return False
        return True

    assert not await is_free()
    await eventually(is_free)
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
    for _ in range(3):
        limiter.settle(await limiter.reserve(key, 1), 1)


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
    settlement.is_retry = True
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

    key = client(requests_per_minute=3, parallel=3)
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
    limiter._unsettled *= 0
    limiter.settle(reservations[0], 1)
    limiter._unsettled *= 6000
    limiter.settle(await limiter.reserve(key, 1), 1)
    assert len(limiter._unsettled) == 6001
