"""Requests under which workers die, as a client sees them over HTTP."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import pytest

from pdserve.base.ids import RequestId
from pdserve.cli.private_redis import PrivateRedis
from pdserve.peers.deaths import note_death
from pdserve.peers.workers import Tier
from pdserve.redis.store import Store, as_bytes, as_list
from router_svc.request.quarantine import Deaths, Quarantine
from router_svc.request.shared_quarantine import DEATHS_KEY, KEY, SharedQuarantine
from router_svc.service import Router
from tests.integration.router_svc.conftest import ScriptedCluster, open_cluster
from tests.integration.router_svc.request.support import TEXT
from tests.integration.router_svc.script import Context, Fault, vanish
from tests.support.redis import eventually
from tests.unit.router_svc.request.test_quarantine import POISON

TIERS: tuple[Tier, ...] = ("prefill", "decode")


def workers(prefill: int, decode: int) -> dict[str, Tier]:
    counts = zip(TIERS, (prefill, decode), strict=True)
    return {f"{tier}-{index}": tier for tier, count in counts for index in range(count)}


def failing_by_itself(cluster: ScriptedCluster, tier: Tier, *, others: Collection[str] = ()) -> Fault:
    """A worker of the tier fails in a step with the request, or with `others` instead.

    The fault does not know which of them runs it, so all leave their note.
    """

    async def fail(context: Context) -> None:
        calls = cluster.calls
        ref = calls.prefills[-1].ref if tier == "prefill" else calls.decode_starts[-1].ref
        async with Store(cluster.router.config.redis_url) as store:
            for worker in cluster.workers.values():
                if worker.record.tier == tier:
                    requests = [RequestId(other) for other in others] or [RequestId(ref.request_id)]
                    await note_death(store, worker.record.worker_id, worker.record.epoch, requests)
        await vanish(context)

    return fail


async def test_a_poison_request_ends_three_decode_workers_and_no_prefill_worker(
    redis_server: PrivateRedis, model_dir: Path
) -> None:
    async with open_cluster(redis_server, model_dir, workers(2, 5)) as cluster:
        cluster.script.fail("decode_started", *[failing_by_itself(cluster, "decode")] * 9)
        status, body = await cluster.complete()
        assert status == 500
        assert "3 workers have failed by themselves while they computed it" in body["error"]["message"]
        starts = cluster.calls.decode_starts
        assert [start.ref.alone for start in starts] == [False, False, True]
        # The tier that has computed the prompt before is not asked again.
        assert len(cluster.calls.prefills) == 1
        assert cluster.calls.commands.count("prefill_locally") == 2
        status, body = await cluster.complete()
        assert status == 422
        assert "refused for another 600 s" in body["error"]["message"]
        assert await cluster.metric("admission_rejections_total", reason="quarantined") == 1
        assert len(starts) == 3
        cluster.script.faults["decode_started"].clear()
        status, _ = await cluster.complete(prompt="Say goodbye")
        assert status == 200


@pytest.mark.parametrize("max_tokens", [1, 50])
async def test_a_poison_request_ends_three_prefill_workers_and_no_decode_worker(
    redis_server: PrivateRedis, model_dir: Path, max_tokens: int
) -> None:
    async with open_cluster(redis_server, model_dir, workers(5, 2)) as cluster:
        cluster.script.fail("prefill_started", *[failing_by_itself(cluster, "prefill")] * 9)
        status, body = await cluster.complete(max_tokens=max_tokens)
        assert status == 500
        assert "3 workers have failed by themselves while they computed it" in body["error"]["message"]
        assert [prefill.ref.alone for prefill in cluster.calls.prefills] == [False, False, True]
        assert "prefill_locally" not in cluster.calls.commands


@pytest.mark.parametrize("max_tokens", [1, 50])
async def test_without_another_prefill_worker_a_poison_request_does_not_reach_the_decode_tier(
    redis_server: PrivateRedis, model_dir: Path, max_tokens: int
) -> None:
    async with open_cluster(redis_server, model_dir, workers(2, 2)) as cluster:
        cluster.script.fail("prefill_started", *[failing_by_itself(cluster, "prefill")] * 9)
        status, _ = await cluster.complete(max_tokens=max_tokens)
        assert status in (502, 503)
        assert len(cluster.calls.prefills) == 2
        assert "prefill_locally" not in cluster.calls.commands


async def test_workers_that_are_killed_blame_no_request(redis_server: PrivateRedis, model_dir: Path) -> None:
    """Fails when losses add up: under a kill each second, innocent requests ended, and were refused for ten minutes."""
    async with open_cluster(redis_server, model_dir, workers(1, 9)) as cluster:
        cluster.script.fail("decode_started", *[vanish] * 8)
        text, _ = await cluster.stream()
        assert text == TEXT
        assert not any(start.ref.alone for start in cluster.calls.decode_starts)


async def test_a_worker_that_fails_in_a_step_of_other_requests_blames_only_those(
    redis_server: PrivateRedis, model_dir: Path
) -> None:
    async with open_cluster(redis_server, model_dir, workers(1, 5)) as cluster:
        cluster.script.fail("decode_started", *[failing_by_itself(cluster, "decode", others=["somebody"])] * 4)
        text, _ = await cluster.stream()
        assert text == TEXT
        assert not any(start.ref.alone for start in cluster.calls.decode_starts)


async def test_a_request_loses_a_limited_number_of_workers_and_is_not_refused_then(
    redis_server: PrivateRedis, model_dir: Path
) -> None:
    async with open_cluster(redis_server, model_dir, workers(1, 6), max_lost_workers=4) as cluster:
        cluster.script.fail("decode_started", *[vanish] * 4)
        status, body = await cluster.complete()
        assert status == 500
        assert "has lost 4 workers, which is the limit (--max-lost-workers)" in body["error"]["message"]
        assert len(cluster.calls.decode_starts) == 4
        assert (await cluster.complete())[0] == 200


async def test_a_request_that_one_router_refuses_is_refused_by_the_others_and_by_one_that_starts_later(
    redis_server: PrivateRedis, model_dir: Path
) -> None:
    """Fails without `pd:refused`: each router would lose three workers to it."""

    async def is_refused_by(router: Router) -> bool:
        return len(router.models.first.requests.quarantine) == 1

    async with open_cluster(redis_server, model_dir, workers(2, 5)) as first:
        first.script.fail("decode_started", *[failing_by_itself(first, "decode")] * 3)
        async with open_cluster(redis_server, model_dir, {}) as second:
            assert (await first.complete())[0] == 500
            await eventually(lambda: is_refused_by(second.router))
        async with Store(redis_server.url) as store:
            [key] = as_list(await store.call("KEYS", f"pd:{DEATHS_KEY}*"))
            # Three workers have failed, the last one alone. `Losses.note` has written them.
            assert sorted(map(as_bytes, as_list(await store.call("HVALS", as_bytes(key))))) == [b"0", b"0", b"1"]
        async with open_cluster(redis_server, model_dir, {}) as third:
            await eventually(lambda: is_refused_by(third.router))
            first.script.faults["decode_started"].clear()
            for worker in first.workers.values():
                first.router.cluster.directory.mark_alive(worker.record.worker_id, worker.record.epoch)
            await third.knows(7)
            status, body = await third.complete()
            assert (status, "refused for another" in body["error"]["message"]) == (422, True)
            assert (await third.complete(prompt="Say goodbye"))[0] == 200


@pytest.mark.own_redis
async def test_two_routers_that_get_one_poison_request_lose_three_workers_together(redis_server: PrivateRedis) -> None:
    """Fails without `on_death`: each router would lose three.

    Many equal requests in one step lose one worker, not many. While Redis is away, each router counts for itself.
    """
    async with Store(redis_server.url) as store:
        routers = [Quarantine(b"key") for _ in range(2)]
        for router in routers:
            SharedQuarantine(router, store)
        lost: list[str] = []

        async def lose(router: Quarantine, deaths: Deaths, *, in_step_of: str | None = None) -> Deaths:
            if in_step_of is None:
                lost.append(f"decode-{len(lost)}:1")
            after = deaths.after("decode")
            return await router.shared(POISON, after, in_step_of or lost[-1], alone=deaths.is_alone)

        first = await lose(routers[0], Deaths())
        equal = await lose(routers[0], Deaths(), in_step_of=lost[0])
        assert (first.is_alone, equal.is_alone) == (False, False)
        second = await lose(routers[1], Deaths())
        assert second.is_alone
        assert (await lose(routers[1], second)).is_over
        assert len(lost) == 3
        # The other router has lost no other worker in between. Its next one is the last, in company or not.
        assert (await lose(routers[0], first)).is_over
        key = store.key(f"{DEATHS_KEY}{routers[0]._digest(POISON).hex()}")
        assert 0 < int(str(await store.call("PTTL", key))) <= 600_000
        await store.call("SET", key, "what a stranger left")
        assert (await lose(routers[0], Deaths())).count == 1
        await redis_server.stop(kill=True)
        assert (await lose(routers[0], Deaths())).count == 1
        await redis_server.start()


async def test_what_a_stranger_writes_there_refuses_no_request(redis_server: PrivateRedis, model_dir: Path) -> None:
    quarantine = Quarantine()
    async with Store(redis_server.url) as store:
        shared = SharedQuarantine(quarantine, store)
        await store.call("ZADD", store.key(KEY), 10**18, "no digest", 10**18, "abcd", "inf", "00" * 16, 1, "11" * 16)
        await shared.exchange()
        assert len(quarantine) <= 1
        await store.call("SET", store.key(KEY), "text")
        await shared.exchange()
        quarantine.on_add(bytes(range(16)))
        await shared.exchange()
        assert await store.call("ZCARD", store.key(KEY)) == 1
        await store.call("DEL", store.key(KEY))
