"""The list of recent requests."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from pdserve.cli.private_redis import PrivateRedis
from tests.integration.router_svc.conftest import ScriptedCluster, open_cluster
from tests.integration.router_svc.script import hang
from tests.support.redis import eventually


async def requests_of(cluster: ScriptedCluster, query: str = "") -> list[dict[str, object]]:
    status, body = await cluster.get(f"/v1/requests{query}")
    assert status == 200, body
    return body["requests"]


async def test_the_latest_request_is_first_and_agrees_with_its_trace(small_cluster: ScriptedCluster) -> None:
    assert await requests_of(small_cluster) == []
    first, second = [(await small_cluster.complete())[1]["id"] for _ in range(2)]
    listed = await requests_of(small_cluster)
    assert [entry["request_id"] for entry in listed] == [second, first]
    trace = await small_cluster.trace(first)
    assert listed[1]["workers"] == ["decode-0", "prefill-0"]
    assert listed[1]["retries"] == listed[1]["fallbacks"] == []
    for field in (
        "state",
        "attempt",
        "outcome",
        "phases",
        "timeline",
        "prefilled_by",
        "prompt_tokens",
        "accepted_at",
        "endpoint",
    ):
        assert listed[1][field] == trace[field]


async def test_a_running_request_is_listed(small_cluster: ScriptedCluster) -> None:
    small_cluster.script.fail("decode", hang)
    running = asyncio.create_task(small_cluster.complete())
    await small_cluster.calls.until(lambda: bool(small_cluster.calls.decode_starts))
    [entry] = await requests_of(small_cluster)
    assert entry["state"] == "queued"
    assert "finish" not in entry["phases"]  # type: ignore[operator]
    running.cancel()

    async def is_cancelled() -> bool:
        return (await requests_of(small_cluster))[0]["state"] == "cancelled"

    await eventually(is_cancelled)


async def test_the_list_is_bounded(redis_server: PrivateRedis, model_dir: Path) -> None:
    tiers = {"prefill-0": "prefill", "decode-0": "decode"}
    async with open_cluster(redis_server, model_dir, tiers, trace_capacity=3) as cluster:
        ids = [(await cluster.complete())[1]["id"] for _ in range(4)]
        assert [entry["request_id"] for entry in await requests_of(cluster)] == ids[:0:-1]
        assert [entry["request_id"] for entry in await requests_of(cluster, "?limit=1")] == ids[-1:]


@pytest.mark.parametrize("limit", ["0", "1001", "-1", "x", "1e2", "٣", "", "9" * 30])
async def test_a_limit_out_of_bounds_is_refused(small_cluster: ScriptedCluster, limit: str) -> None:
    status, body = await small_cluster.get(f"/v1/requests?limit={limit}")
    assert (status, body["error"]["param"]) == (400, "limit")
    assert "from 1 to 1000" in body["error"]["message"]


async def test_the_list_has_no_text_of_prompts_or_answers(small_cluster: ScriptedCluster) -> None:
    _, body = await small_cluster.complete(prompt="a secret of mine")
    answer = body["choices"][0]["text"].strip()
    async with small_cluster.http.get(f"{small_cluster.base_url}/v1/requests") as response:
        text = await response.text()
    assert body["id"] in text
    assert "secret" not in text
    assert answer not in text
