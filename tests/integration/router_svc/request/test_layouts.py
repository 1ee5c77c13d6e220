"""Two versions of the KV layout in one cluster, as during a rollout: they never pair, and no request fails."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from pdserve.base.layout import KvLayout
from tests.integration.router_svc.conftest import ScriptedCluster
from tests.integration.router_svc.request.support import TEXT, after_first_token
from tests.integration.router_svc.script import vanish
from tests.support.records import LAYOUT
from tests.support.redis import eventually

OLD, NEW = LAYOUT, replace(LAYOUT, model="next-fingerprint")
NUM_REQUESTS = 8


async def roll_out(cluster: ScriptedCluster, **layouts: KvLayout) -> None:
    """Gives workers these layouts, and returns once the router knows them."""
    for name, layout in layouts.items():
        cluster.workers[name.replace("_", "-")].set(layout=layout)
    wanted = {name: worker.record.layout for name, worker in cluster.workers.items()}

    async def is_known() -> bool:
        known = cluster.router.cluster
        return {worker.worker_id: worker.layout for tier in ("prefill", "decode") for worker in known.ready(tier)} == {
            **wanted
        }

    await eventually(is_known)


async def records_of_a_crowd(cluster: ScriptedCluster) -> list[dict[str, Any]]:
    """The decision records of concurrent requests. Fails if one of them does."""
    before = len(cluster.calls.decode_starts)
    texts = await asyncio.gather(*(cluster.stream() for _ in range(NUM_REQUESTS)))
    assert [text for text, _ in texts] == [TEXT] * NUM_REQUESTS
    starts = cluster.calls.decode_starts[before:]
    assert len(starts) == NUM_REQUESTS
    return [await cluster.trace(start.ref.request_id) for start in starts]


def layouts_of(cluster: ScriptedCluster, record: dict[str, Any]) -> set[str]:
    """The models of the workers that a request was sent to."""
    return {cluster.workers[decision["worker"]].record.layout.model for decision in record["decisions"]}


async def test_old_and_new_pairs_serve_side_by_side_and_no_request_crosses(cluster: ScriptedCluster) -> None:
    await roll_out(cluster, prefill_1=NEW, decode_1=NEW)
    records = await records_of_a_crowd(cluster)
    used = [layouts_of(cluster, record) for record in records]
    assert {len(layouts) for layouts in used} == {1}
    assert set.union(*used) == {OLD.model, NEW.model}
    for record in records:
        assert (record["prefilled_by"], record["retries"], record["fallbacks"]) == ("prefill", [], [])
    assert await cluster.metric("degraded", subject="layout") == 0


@pytest.mark.parametrize(
    "ahead",
    [{"prefill_0": NEW, "prefill_1": NEW}, {"decode_0": NEW, "decode_1": NEW}, {"decode_1": NEW}],
    ids=["prefill", "decode", "one decode worker"],
)
async def test_while_one_tier_is_ahead_decode_workers_without_a_pair_prefill(
    cluster: ScriptedCluster, ahead: dict[str, KvLayout]
) -> None:
    await roll_out(cluster, **ahead)
    unpaired = set(cluster.router.cluster.unpaired_decode)
    for record in await records_of_a_crowd(cluster):
        assert len(layouts_of(cluster, record)) == 1
        is_alone = record["decisions"][0]["worker"] in unpaired
        assert record["prefilled_by"] == ("decode" if is_alone else "prefill")
        assert [each["reason"] for each in record["fallbacks"]] == ["layout_mismatch"] * is_alone
        assert record["retries"] == []

    async def is_reported() -> bool:
        return "layout" in (await cluster.get("/health"))[1]["degraded"]

    await eventually(is_reported)
    status, body = await cluster.get("/readyz")
    assert status == 200
    assert all(name in body["degraded"]["layout"] for name in unpaired)
    assert await cluster.metric("degraded", subject="layout") == 1


async def test_a_lost_prefill_worker_is_not_replaced_by_one_with_another_layout(cluster: ScriptedCluster) -> None:
    await roll_out(cluster, prefill_1=NEW, decode_1=NEW)
    cluster.script.fail("prefill_token", vanish)
    text, _ = await cluster.stream()
    assert text == TEXT
    record = await cluster.only_trace()
    assert len(layouts_of(cluster, record)) == 1
    assert [each["reason"] for each in record["fallbacks"]] == ["peer_lost"]


async def test_an_answer_that_has_started_waits_for_a_worker_with_its_layout(cluster: ScriptedCluster) -> None:
    await roll_out(cluster, prefill_1=NEW, decode_1=NEW)
    cluster.script.fail("decode_started", after_first_token(cluster, vanish))
    text, _ = await cluster.stream()
    assert text == TEXT
    assert len(layouts_of(cluster, await cluster.only_trace())) == 1


async def test_an_answer_that_has_not_started_moves_to_another_layout(cluster: ScriptedCluster) -> None:
    await roll_out(cluster, prefill_1=NEW, decode_1=NEW)
    cluster.script.fail("decode", vanish)
    text, _ = await cluster.stream()
    assert text == TEXT
    record = await cluster.only_trace()
    decode = [each["worker"] for each in record["decisions"] if each["tier"] == "decode"]
    prefill = [each["worker"] for each in record["decisions"] if each["tier"] == "prefill"]
    assert len(decode) == 2
    assert prefill[-1][-1] == decode[-1][-1]
