"""How a request's prompt is counted on the workers that compute it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from unittest.mock import AsyncMock

import pytest

from pdserve.base.errors import NoFreeBlocks
from pdserve.base.ids import RouterId, WorkerId
from pdserve.cli.private_redis import PrivateRedis
from router_svc.routing.cluster import Cluster
from router_svc.routing.placement import queued_tokens
from tests.integration.router_svc.conftest import ScriptedCluster, open_cluster
from tests.integration.router_svc.request.support import (
    ONE_OF_EACH,
    TEXT,
    reports_queued,
)
from tests.integration.router_svc.script import Context, failing, hang
from tests.support.redis import eventually


@pytest.mark.parametrize(("whose", "tier"), [("mine", "prefill"), ("another's", "decode")])
async def test_an_old_report_of_this_routers_prompt_keeps_no_prompt_from_an_idle_prefill_tier(
    redis_server: PrivateRedis, model_dir: Path, whose: str, tier: str
) -> None:
    async with open_cluster(redis_server, model_dir, ONE_OF_EACH, local_prefill_threshold=4) as cluster:
        await cluster.complete()
        router_id = RouterId(cluster.calls.prefills[0].ref.router_id)
        assert router_id == cluster.calls.decode_starts[0].ref.router_id != ""
        await reports_queued(cluster, router_id if whose == "mine" else RouterId(whose))
        _, body = await cluster.complete()
        assert (await cluster.trace(body["id"]))["prefilled_by"] == tier


@pytest.mark.parametrize("is_dead", [False, True])
async def test_a_prompt_whose_client_left_counts_as_reported_until_another_is_computed_or_the_worker_is_gone(
    small_cluster: ScriptedCluster, is_dead: bool
) -> None:
    in_flight = small_cluster.router.cluster.in_flight
    reached = asyncio.Event()

    async def reach_and_hang(context: Context) -> None:
        reached.set()
        await hang(context)

    small_cluster.script.fail("prefill", reach_and_hang)
    request = asyncio.create_task(small_cluster.complete())
    await reached.wait()
    request.cancel()
    await small_cluster.calls.until(lambda: small_cluster.calls.num_open == 0)
    await reports_queued(small_cluster, in_flight.router_id)
    [prefill] = small_cluster.router.cluster.ready("prefill")
    assert queued_tokens(prefill, in_flight) == 5000
    if is_dead:
        small_cluster.router.cluster.directory.mark_lost(prefill.worker_id, prefill.epoch)

        async def is_forgotten() -> bool:
            return queued_tokens(prefill, in_flight) == 0

        await eventually(is_forgotten)
    else:
        await small_cluster.complete()
        assert queued_tokens(prefill, in_flight) == 0


@pytest.mark.parametrize("point", ["prefill_queued", "prefill_started"])
@pytest.mark.parametrize("cached_tokens", [0, 1])
async def test_the_workers_own_count_of_cached_tokens_corrects_the_index(
    small_cluster: ScriptedCluster, monkeypatch: pytest.MonkeyPatch, point: str, cached_tokens: int
) -> None:
    in_flight = small_cluster.router.cluster.in_flight
    believed = AsyncMock(return_value={WorkerId("prefill-0"): 1000})
    monkeypatch.setattr(Cluster, "overlap", believed)
    small_cluster.script.cached_tokens = cached_tokens
    counted: list[int] = []

    async def count(_: Context) -> None:
        missing = len(small_cluster.calls.prefills[0].prompt_token_ids) - cached_tokens

        async def is_counted() -> bool:
            return in_flight.prompt_tokens(WorkerId("prefill-0")) == missing

        await eventually(is_counted)
        counted.append(missing)

    small_cluster.script.fail(point, count)
    await small_cluster.complete()
    assert len(counted) == 1
    assert counted[0] > 2
    assert in_flight.prompt_tokens(WorkerId("prefill-0")) == 0


async def test_a_prompt_that_no_prefill_worker_received_was_not_given_up_there(
    redis_server: PrivateRedis, model_dir: Path
) -> None:
    async with open_cluster(redis_server, model_dir, ONE_OF_EACH, reserve_timeout_s=0.1) as cluster:
        in_flight = cluster.router.cluster.in_flight
        cluster.script.fail("decode", *[failing(NoFreeBlocks("full"))] * 100)
        status, _ = await cluster.complete()
        assert (status, cluster.calls.prefills) == (503, [])
        await reports_queued(cluster, in_flight.router_id)
        assert queued_tokens(cluster.router.cluster.ready("prefill")[0], in_flight) == 0


@pytest.mark.parametrize("fallback", ["no_prefill_worker", "not_receivable"])
async def test_a_prompt_that_the_decode_worker_has_to_compute_is_counted_there(
    redis_server: PrivateRedis, model_dir: Path, fallback: str
) -> None:
    async with open_cluster(redis_server, model_dir, ONE_OF_EACH, local_prefill_threshold=1) as cluster:
        in_flight = cluster.router.cluster.in_flight
        counted: list[tuple[int, int]] = []

        async def count(_: Context) -> None:
            tokens = len(cluster.calls.decode_starts[0].prompt_token_ids)

            async def is_counted() -> bool:
                return in_flight.prompt_tokens(WorkerId("decode-0")) == tokens

            await eventually(is_counted)
            counted.append((tokens, in_flight.prompt_tokens(WorkerId("prefill-0"))))

        if fallback == "not_receivable":
            cluster.calls.max_receivable_tokens = 2
            cluster.script.fail("decode_token", count)
        else:
            cluster.script.fail("prefill", failing(NoFreeBlocks("none")))
            cluster.script.fail("decode_local", count)
        text, _ = await cluster.stream()
        assert text == TEXT
        assert [there for _, there in counted] == [0]
        assert in_flight.prompt_tokens(WorkerId("decode-0")) == 0
