"""Usage of a router with API keys: what requests cost, however they end, and who may read it."""

from __future__ import annotations

import asyncio
import csv
import hashlib
import io
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from pdserve.base.errors import PeerLost
from pdserve.cli.private_redis import PrivateRedis
from pdserve.v1 import inference_pb2 as pb
from pdserve.v1 import inference_pb2_grpc
from router_svc.records.milestones import Milestone
from tests.integration.router_svc.conftest import ScriptedCluster, in_own_task, open_cluster
from tests.integration.router_svc.script import failing, hang
from tests.support.deadline import DEADLINE_S
from tests.support.redis import eventually
from tests.support.tiny_model import NAME

ONE_OF_EACH = {"prefill-0": "prefill", "decode-0": "decode"}
BODY = {"model": NAME, "prompt": "Say hello", "max_tokens": 50}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture
async def locked(redis_server: PrivateRedis, model_dir: Path, tmp_path: Path) -> AsyncIterator[ScriptedCluster]:
    """A router with the operator's key `root`, `a1` and `a2` of a tenant, `b`, `c` with limits, and `m` for metrics."""
    tenants = {"a1": "team-a", "a2": "team-a", "b": "team-b", "c": "team-c", "m": "prometheus"}
    keys: list[dict[str, Any]] = [
        {"id": name, "sha256": hashlib.sha256(name.encode()).hexdigest(), "tenant": tenant, "metrics": name == "m"}
        for name, tenant in tenants.items()
    ]
    keys[3] |= {"tokens_per_minute": 1000, "budget": 1000}
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"keys": keys}), encoding="utf-8")
    settings: dict[str, Any] = {"api_key": ("root",), "api_keys_file": str(path), "admin_port": 0}
    async with in_own_task(open_cluster(redis_server, model_dir, ONE_OF_EACH, **settings)) as cluster:  # type: ignore[arg-type]
        yield cluster


async def usage(cluster: ScriptedCluster, key: str, *, url: str = "") -> list[dict[str, Any]]:
    async with cluster.http.get(f"{url or cluster.base_url}/v1/usage", headers=bearer(key)) as response:
        assert response.status == 200, await response.text()
        rows: list[dict[str, Any]] = (await response.json())["data"]
        return rows


async def is_charged(cluster: ScriptedCluster, key: str, tokens: int) -> bool:
    store = cluster.router._store
    state = await store.call("HGET", store.key(f"limits:{key}"), "b")
    # What is open is reserved, too.
    return state == str(tokens).encode() and not await store.call("ZCARD", store.key(f"leases:{key}"))


def counts(row: dict[str, Any]) -> tuple[object, ...]:
    return tuple(row[name] for name in ("tenant", "key", "requests", "input_tokens", "cached_tokens", "output_tokens"))


async def test_a_tenant_reads_its_own_usage_and_an_admin_all(locked: ScriptedCluster) -> None:
    """Fails if the tenant is not passed to the store, or the store does not compare it."""
    locked.script.cached_tokens = 2
    used: dict[str, tuple[int, int]] = {}
    for key, fields in (("a1", {}), ("a1", {"n": 2}), ("a2", {}), ("b", {"prompt": ["Say hello", "x"]}), ("root", {})):
        status, answer = await locked.post("/v1/completions", BODY | fields, headers=bearer(key))
        assert status == 200
        before, tokens = used.get(key, (0, 0)), answer["usage"]
        used[key] = (before[0] + tokens["prompt_tokens"], before[1] + tokens["completion_tokens"])
    expected = [
        ("default", "key-1", 1, used["root"][0], 2, used["root"][1]),
        ("team-a", "a1", 2, used["a1"][0], 4, used["a1"][1]),
        ("team-a", "a2", 1, used["a2"][0], 2, used["a2"][1]),
        ("team-b", "b", 1, used["b"][0], 3, used["b"][1]),
    ]
    assert [counts(row) for row in await usage(locked, "root")] == expected
    assert [counts(row) for row in await usage(locked, "a1")] == expected[1:3]
    assert [counts(row) for row in await usage(locked, "b", url=locked.admin_url)] == expected[3:]
    async with locked.http.get(f"{locked.base_url}/v1/usage?format=csv", headers=bearer("a2")) as response:
        assert response.content_type == "text/csv"
        rows = [*csv.DictReader(io.StringIO(await response.text()))]
    assert [(row["key"], row["model"], row["requests"]) for row in rows] == [("a1", NAME, "2"), ("a2", NAME, "1")]
    async with locked.http.get(f"{locked.base_url}/v1/usage", headers=bearer("m")) as response:
        assert response.status == 403
    for tenant, number in (("team-a", 3), ("team-b", 1), ("default", 1), ("prometheus", 0)):
        assert await locked.metric("tenant_requests_total", tenant=tenant) == number
    tokens = {kind: await locked.metric("tenant_tokens_total", tenant="team-b", kind=kind) for kind in KINDS}
    assert tuple(tokens.values()) == expected[3][3:]


KINDS = ("input", "cached", "output")


async def test_what_was_computed_counts_once_when_a_worker_fails_or_the_client_leaves(locked: ScriptedCluster) -> None:
    """Fails if usage is counted by attempt, or at the end of requests that finished only."""
    locked.script.fail("prefill_token", failing(PeerLost("the peer is gone")))
    status, answer = await locked.post("/v1/completions", BODY, headers=bearer("a1"))
    assert status == 200
    tokens = answer["usage"]
    assert [counts(row) for row in await usage(locked, "a1")] == [
        ("team-a", "a1", 1, tokens["prompt_tokens"], 0, tokens["completion_tokens"])
    ]
    locked.script.pace = asyncio.Semaphore(2)
    url = f"{locked.base_url}/v1/completions"
    async with locked.http.post(url, json=BODY | {"stream": True}, headers=bearer("b")) as response:
        await response.content.readline()
    await locked.calls.until(lambda: locked.calls.num_open == 0)

    async def is_counted() -> bool:
        return bool(await usage(locked, "b"))

    # The handler ends a little after its calls.
    await eventually(is_counted)
    [row] = await usage(locked, "b")
    assert (row["requests"], row["input_tokens"]) == (1, tokens["prompt_tokens"])
    assert 1 <= row["output_tokens"] < tokens["completion_tokens"]


@pytest.mark.parametrize(("point", "counted"), [("prefill_queued", 0), ("prefill_started", 9)])
async def test_a_client_that_leaves_before_its_first_token_pays_for_its_prompt(
    locked: ScriptedCluster, redis_server: PrivateRedis, point: str, counted: int
) -> None:
    """Fails if limits and usage begin with the first token: prefill would be free for those who leave in time.

    A prompt that a worker has and has not reported yet counts for the limits alone: it may be computed by now.
    """
    locked.script.cached_tokens = 4
    locked.script.fail(point, hang)

    async def has_started() -> bool:
        [record] = locked.router._traces._recent.newest()
        return bool(record.decisions) and (Milestone.PREFILL_START in record.milestones) == bool(counted)

    async with asyncio.TaskGroup() as tasks:
        leaving = tasks.create_task(locked.post("/v1/completions", BODY, headers=bearer("c")))
        await locked.calls.until(lambda: bool(locked.calls.prefills))
        await eventually(has_started)
        leaving.cancel()

    async def is_counted() -> bool:
        return bool(await usage(locked, "c"))

    await eventually(is_counted)
    [row] = await usage(locked, "c")
    assert counts(row)[2:] == (1, counted, 4 if counted else 0, 0)
    await eventually(lambda: is_charged(locked, "c", 9))


async def test_a_request_over_grpc_is_charged_and_counted_like_one_over_http(locked: ScriptedCluster) -> None:
    """Fails if the servicer runs requests without their client."""
    request = pb.GenerateRequest(model=NAME, text="Say hello", sampling=pb.ClientSampling(max_tokens=50))
    async with locked.channel() as channel:
        call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(request, metadata=[("x-api-key", "c")])
        answer = [message async for message in call][-1].usage
        trailing = dict(await call.trailing_metadata())
    tokens = answer.prompt_tokens + answer.completion_tokens
    # What was used since then may have come back in part.
    assert 1000 - tokens <= int(trailing["x-ratelimit-remaining-tokens"]) < 1000
    assert [counts(row) for row in await usage(locked, "c")] == [
        ("team-c", "c", 1, answer.prompt_tokens, 0, answer.completion_tokens)
    ]
    await eventually(lambda: is_charged(locked, "c", tokens))
    assert (await locked.post("/v1/completions", BODY, headers=bearer("c")))[0] == 200
    assert [counts(row) for row in await usage(locked, "c")] == [
        ("team-c", "c", 2, 2 * answer.prompt_tokens, 0, 2 * answer.completion_tokens)
    ]
    await eventually(lambda: is_charged(locked, "c", 2 * tokens))


async def test_a_tenant_that_asks_for_usage_all_the_time_does_not_keep_others_out(locked: ScriptedCluster) -> None:
    """Fails if open requests are counted for all tenants together."""

    async def status(key: str) -> int:
        async with locked.http.get(f"{locked.base_url}/v1/usage", headers=bearer(key)) as response:
            return response.status

    answered: list[asyncio.Task[int]] = []
    async with asyncio.TaskGroup() as tasks, asyncio.timeout(DEADLINE_S), locked.router._usage._flushing:
        # While this is held, all who ask wait.
        for keys in (("a1", "a2", "a1"), ("b", "b", "b")):
            asking = [tasks.create_task(status(key)) for key in keys]
            done, _ = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
            assert [task.result() for task in done] == [429]
            answered += asking
    assert sorted(task.result() for task in answered) == [200] * 4 + [429] * 2


async def test_refused_requests_and_routers_without_keys_have_no_usage(
    locked: ScriptedCluster, small_cluster: ScriptedCluster
) -> None:
    locked.router.models.first.requests.drain()
    assert (await locked.post("/v1/completions", BODY, headers=bearer("a1")))[0] == 503
    assert (await small_cluster.complete())[0] == 200
    assert await usage(locked, "root") == []
    status, answer = await small_cluster.get("/v1/usage")
    assert (status, answer["data"]) == (200, [])
    assert not [
        sample
        for family in small_cluster.router.metrics.registry.collect()
        for sample in family.samples
        if sample.name.startswith("pdserve_tenant_")
    ]


@pytest.mark.own_redis
async def test_an_unusable_query_or_redis_is_reported(locked: ScriptedCluster, redis_server: PrivateRedis) -> None:
    async def get(query: str) -> tuple[int, dict[str, Any]]:
        async with locked.http.get(f"{locked.base_url}/v1/usage{query}", headers=bearer("a1")) as response:
            return response.status, (await response.json()).get("error", {})

    status, error = await get("?from=2020-01-01&to=2026-01-01")
    assert (status, error["param"]) == (400, "from")
    assert "the limit is 400" in error["message"]
    status, error = await get("?limit=5")
    assert (status, error["param"]) == (400, "limit")
    await redis_server.stop()
    status, error = await get("")
    assert (status, error["type"]) == (503, "store_error")
    await redis_server.start()
