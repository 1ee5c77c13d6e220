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
from tests.integration.router_svc.conftest import ScriptedCluster, in_own_task, open_cluster
from tests.integration.router_svc.script import failing
from tests.support.redis import eventually
from tests.support.tiny_model import NAME

ONE_OF_EACH = {"prefill-0": "prefill", "decode-0": "decode"}
BODY = {"model": NAME, "prompt": "Say hello", "max_tokens": 50}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture
async def locked(redis_server: PrivateRedis, model_dir: Path, tmp_path: Path) -> AsyncIterator[ScriptedCluster]:
    """A router with an operator's key, `root`, the keys `a1` and `a2` of a tenant, `b` of another, `m` for metrics."""
    tenants = {"a1": "team-a", "a2": "team-a", "b": "team-b", "m": "prometheus"}
    keys = [
        {"id": name, "sha256": hashlib.sha256(name.encode()).hexdigest(), "tenant": tenant, "metrics": name == "m"}
        for name, tenant in tenants.items()
    ]
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


async def test_refused_requests_and_routers_without_keys_have_no_usage(
    locked: ScriptedCluster, small_cluster: ScriptedCluster
) -> None:
    locked.router._requests.drain()
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
