"""What a router and its workers do in Redis needs no right beyond the documented ones."""

from __future__ import annotations

import asyncio
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from pdserve.cli.private_redis import PrivateRedis
from pdserve.redis.store import Store, as_list
from tests.integration.redis.test_redis_servers import RIGHTS
from tests.integration.router_svc.conftest import ScriptedCluster, open_cluster
from tests.integration.router_svc.request.support import ONE_OF_EACH
from tests.integration.router_svc.script import hang
from tests.support.own_task import in_own_task
from tests.support.redis import eventually
from tests.support.tiny_model import NAME


@dataclass(frozen=True, slots=True)
class User:
    """A Redis as one of its users sees it."""

    server: PrivateRedis
    name: str

    @property
    def url(self) -> str:
        return self.server.url.replace("://", f"://{self.name}:p%40ss%3Aw%2Frd%23@")


@pytest.mark.own_redis
async def test_every_feature_works_with_the_documented_rights(
    redis_server: PrivateRedis, model_dir: Path, tmp_path: Path
) -> None:
    key = {"id": "limited", "sha256": hashlib.sha256(b"limited").hexdigest(), "tokens_per_minute": 10_000}
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({"keys": [{**key, "parallel": 4}]}), encoding="utf-8")
    settings: dict[str, Any] = {"api_key": ("root",), "api_keys_file": str(keys), "resume_timeout_s": 60.0}
    async with Store(redis_server.url) as admin:
        for name, pattern in (("pdserve", "~pd:*"), ("state", "~pdstate:*")):
            await admin.call(
                "ACL", "SETUSER", name, "on", ">p@ss:w/rd#", pattern, "resetchannels", *RIGHTS[1:], "-client"
            )
        settings["state_url"] = User(redis_server, "state").url
        services: Any = User(redis_server, "pdserve")
        async with in_own_task(open_cluster(services, model_dir, ONE_OF_EACH, **settings)) as cluster:
            headers = {"Authorization": "Bearer limited"}
            async with aiohttp.ClientSession(cluster.base_url, headers=headers) as http:
                await _use(cluster, http)
        assert as_list(await admin.call("ACL", "LOG")) == []
        kept = {bytes(each).split(b":")[0] for each in as_list(await admin.call("KEYS", "*"))}
        assert kept == {b"pd", b"pdstate"}


async def _use(cluster: ScriptedCluster, http: aiohttp.ClientSession) -> None:
    """A stream that is resumed, a request that is cancelled, responses that are stored, a batch and usage."""
    body = {"model": NAME, "prompt": "Say hello", "max_tokens": 50}
    async with http.post(
        "/v1/completions", json={**body, "stream": True}, headers={"X-Request-Id": "mine"}
    ) as response:
        text = await response.text()
        assert "[DONE]" in text
    async with http.get("/v1/requests/mine/stream") as response:
        assert (response.status, "[DONE]" in await response.text()) == (200, True)
    cluster.script.fail("decode", hang)
    waiting = asyncio.create_task(_status(http, "/v1/completions", body, {"X-Request-Id": "long"}))
    await eventually(lambda: _is_cancelled(http))
    assert await waiting == 499
    assert await _status(http, "/v1/responses", {"model": NAME, "input": "x"}) == 200
    assert await _status(http, "/v1/responses", {"model": NAME, "input": "x", "background": True}) == 200
    line = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": body}
    form = aiohttp.FormData({"purpose": "batch"})
    form.add_field("file", json.dumps(line).encode(), filename="batch.jsonl")
    async with http.post("/v1/files", data=form) as response:
        file = (await response.json())["id"]
    order = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    async with http.post("/v1/batches", json=order) as response:
        batch = (await response.json())["id"]
    await eventually(lambda: _is_completed(http, batch))
    async with http.get("/v1/usage") as response:
        assert response.status == 200


async def _status(http: aiohttp.ClientSession, path: str, body: object, headers: Any = None) -> int:
    async with http.post(path, json=body, headers=headers) as response:
        await response.read()
        return response.status


async def _is_cancelled(http: aiohttp.ClientSession) -> bool:
    async with http.post("/v1/requests/long/cancel") as response:
        return response.status == 200


async def _is_completed(http: aiohttp.ClientSession, batch: str) -> bool:
    async with http.get(f"/v1/batches/{batch}") as response:
        return bool((await response.json())["status"] == "completed")
