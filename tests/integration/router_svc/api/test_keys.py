"""A router with API keys: nothing but probes without one, however a request is spelt, and tenants are apart."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pool import Default
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from pdserve.cli.private_redis import PrivateRedis
from pdserve.v1 import inference_pb2 as pb
from pdserve.v1 import inference_pb2_grpc
from router_svc.api.reference.page import Reference
from tests.integration.router_svc.conftest import ScriptedCluster, in_own_task, open_cluster
from tests.support.redis import eventually
from tests.support.tiny_model import NAME

ONE_OF_EACH = {"prefill-0": "prefill", "decode-0": "decode"}
BODY = {"model": NAME, "prompt": "Say hello", "max_tokens": 50}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture
async def locked(redis_server: PrivateRedis, model_dir: Path, tmp_path: Path) -> AsyncIterator[ScriptedCluster]:
    """A router with an operator's key, `root`, the keys `a` and `b` of two tenants, and `m` for metrics."""
    keys: list[dict[str, object]] = [
        {"id": name, "sha256": hashlib.sha256(name.encode()).hexdigest(), "metrics": name == "m"} for name in "abm"
    ]
    limited = {"id": "limited", "sha256": hashlib.sha256(b"limited").hexdigest()}
    keys.append({**limited, "requests_per_minute": 2, "tokens_per_minute": 5000})
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"keys": keys}), encoding="utf-8")
    settings: dict[str, Any] = {"api_key": ("root",), "api_keys_file": str(path)}
    async with in_own_task(open_cluster(redis_server, model_dir, ONE_OF_EACH, **settings)) as cluster:  # type: ignore[arg-type]
        yield cluster


async def raw_status(cluster: ScriptedCluster, request: str) -> int:
    host, port = cluster.base_url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"{request}\r\nConnection: close\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    return int(answer.split()[1])


def routes_of(cluster: ScriptedCluster) -> list[tuple[str, str]]:
    front = cluster.router._front()
    routes = [*front._client_routes(), *front._operator_routes(), *Reference().routes()]
    return [(route.method, route.path.replace("{id}", "x").replace("{name:.+}", NAME)) for route in routes]  # type: ignore[attr-defined]


async def test_every_path_but_probes_wants_a_key_however_it_is_spelt(locked: ScriptedCluster) -> None:
    free = {"/", "/livez", "/readyz", "/health", "/console", "/console/", "/console/{name}"}
    free |= {"/openapi.json", "/docs", "/docs/", "/docs/{name}"}
    guarded = [(method, path) for method, path in routes_of(locked) if path not in free]
    assert len(guarded) >= 10
    for method, path in guarded:
        spellings = [
            path,
            f"/{path}",
            path.upper(),
            f"{path}/",
            f"{path}?a=/livez",
            f"{path}#/livez",
            f"/livez/..{path}",
            f"/livez%2f..{path}",
            path.replace("/v1/", "/v1%2f"),
            f"http://localhost{path}",
            f"http://localhost/livez/..{path}",
        ]
        for spelling in spellings:
            for host in ("localhost", "127.0.0.1:1", "localhost/livez"):
                status = await raw_status(locked, f"{method} {spelling} HTTP/1.1\r\nHost: {host}")
                assert status in (400, 401, 403), (method, spelling, host, status)
                assert status != 403 or host == "localhost/livez"
    for path in ("/livez", "/readyz", "/health", "/console/", "/docs/", "/openapi.json"):
        assert await raw_status(locked, f"GET {path} HTTP/1.1\r\nHost: localhost") == 200


async def test_a_refusal_has_openais_shape_and_a_key_opens(locked: ScriptedCluster) -> None:
    async with locked.http.post(f"{locked.base_url}/v1/completions", json=BODY) as response:
        assert (response.status, response.headers["WWW-Authenticate"]) == (401, "Bearer")
        error = (await response.json())["error"]
        assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", None, "invalid_api_key")
    for headers in (bearer("a"), {"x-api-key": "b"}, bearer("root") | {"x-api-key": "root"}):
        assert (await locked.post("/v1/completions", BODY, headers=headers))[0] == 200
    assert (await locked.post("/v1/completions", BODY, headers=bearer("a") | {"x-api-key": "b"}))[0] == 401


async def test_the_cluster_is_for_admins(locked: ScriptedCluster) -> None:
    for path in ("/metrics", "/v1/cluster", "/console/events"):
        for key, expected in (("a", 403), ("root", 200)):
            async with locked.http.get(locked.base_url + path, headers=bearer(key)) as response:
                assert response.status == expected, (path, key)


async def test_a_key_for_metrics_reads_them_and_does_nothing_else(locked: ScriptedCluster) -> None:
    async with locked.http.get(f"{locked.base_url}/metrics", headers=bearer("m")) as response:
        assert response.status == 200
    others = [each for each in routes_of(locked) if each[1].startswith("/v1") or each[1] == "/console/events"]
    for method, path in others:
        async with locked.http.request(method, locked.base_url + path, headers=bearer("m"), json=BODY) as response:
            assert response.status == 403, (method, path)
    async with locked.channel() as channel:
        call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(
            pb.GenerateRequest(), metadata=(("x-api-key", "m"),)
        )
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
        assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_traces_are_for_their_tenant_and_admins(locked: ScriptedCluster) -> None:
    """GHSA-84j6-jc92-77jm. Fails where `OperatorApi` asks for records of every tenant."""
    _, answer = await locked.post("/v1/completions", BODY, headers=bearer("a"))
    path = f"{locked.base_url}/v1/requests/{answer['id']}/trace"
    for key, expected in (("a", 200), ("b", 404), ("root", 200)):
        async with locked.http.get(path, headers=bearer(key)) as response:
            assert response.status == expected, key
        async with locked.http.get(f"{locked.base_url}/v1/requests", headers=bearer(key)) as response:
            assert len((await response.json())["requests"]) == (expected == 200), key


async def test_a_trace_in_redis_is_for_its_tenant_too(locked: ScriptedCluster) -> None:
    """GHSA-84j6-jc92-77jm. Fails where a record of Redis is not compared with the tenant."""
    _, answer = await locked.post("/v1/completions", BODY, headers=bearer("a"))
    traces = locked.router._traces
    traces._recent._records.clear()

    async def found(tenant: str | None) -> bool:
        return await traces.get(answer["id"], tenant=tenant) is not None

    # Redis does not notify when the record of the ended request is there.
    await eventually(lambda: found("a"))
    assert await found(None)
    assert not await found("b")


async def test_tenants_and_salts_share_no_cached_blocks(locked: ScriptedCluster) -> None:
    """CVE-2025-46570, finding 16. Fails where `_owned` leaves the cache salt as the client sent it."""
    requests = [("a", {}), ("b", {}), ("a", {}), ("a", {"cache_salt": "s"}), ("b", {"cache_salt": "s"})]
    for key, more in requests:
        assert (await locked.post("/v1/completions", BODY | more, headers=bearer(key)))[0] == 200
    salts = [start.cache_salt for start in locked.calls.decode_starts]
    assert salts[0] == salts[2]
    assert len(set(salts)) == 4
    assert all(len(salt) == 16 for salt in salts)


@pytest.mark.parametrize("salt", ["", "a@b", "a/b", "a\\b", "a\0b", "x" * 129])
async def test_a_salt_that_vllm_refuses_is_refused(small_cluster: ScriptedCluster, salt: str) -> None:
    status, body = await small_cluster.complete(cache_salt=salt)
    assert (status, body["error"]["param"]) == (400, "cache_salt")


async def test_a_key_has_a_ceiling_of_priority(redis_server: PrivateRedis, model_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    entry = {"id": "a", "sha256": hashlib.sha256(b"a").hexdigest(), "priority_ceiling": 3}
    path.write_text(json.dumps({"keys": [entry]}), encoding="utf-8")
    settings: dict[str, Any] = {"api_keys_file": str(path), "scheduling_policy": "priority"}
    async with open_cluster(redis_server, model_dir, ONE_OF_EACH, **settings) as cluster:  # type: ignore[arg-type]
        for priority, expected in ((3, 200), (2, 403)):
            status, _ = await cluster.post("/v1/completions", BODY | {"priority": priority}, headers=bearer("a"))
            assert status == expected


async def test_grpc_wants_the_same_keys(locked: ScriptedCluster) -> None:
    request = pb.GenerateRequest(model=NAME, text="Say hello", sampling=pb.ClientSampling(max_tokens=50))
    async with locked.channel() as channel:
        generate = inference_pb2_grpc.InferenceServiceStub(channel).Generate
        for metadata in ((), (("authorization", "Bearer wrong"),), (("authorization", "Bearer a"), ("x-api-key", "b"))):
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                [_ async for _ in generate(request, metadata=metadata)]
            assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED
        for metadata in ((("authorization", "Bearer a"),), (("x-api-key", "a"),)):
            assert [_ async for _ in generate(request, metadata=metadata)]
    salts = {start.cache_salt for start in locked.calls.decode_starts}
    assert len(salts) == 1
    assert salts != {b""}


async def rate_limited(cluster: ScriptedCluster) -> float:
    async with cluster.http.get(f"{cluster.base_url}/metrics", headers=bearer("m")) as response:
        [line] = [
            each
            for each in (await response.text()).splitlines()
            if "rejections_total" in each and 'reason="rate_limited"' in each
        ]
    return float(line.split()[-1])


async def test_every_answer_of_a_key_with_limits_says_what_is_left(locked: ScriptedCluster) -> None:
    async def post(**fields: object) -> tuple[int, dict[str, str], str]:
        url = f"{locked.base_url}/v1/completions"
        async with locked.http.post(url, json=BODY | fields, headers=bearer("limited")) as response:
            headers = {name.lower(): value for name, value in response.headers.items()}
            return response.status, headers, await response.text()

    async with locked.http.get(f"{locked.base_url}/v1/models", headers=bearer("limited")) as response:
        assert response.headers["x-ratelimit-remaining-requests"] == "2"
    async with locked.http.get(f"{locked.base_url}/v1/models", headers=bearer("a")) as response:
        assert "x-ratelimit-limit-requests" not in response.headers
    status, headers, _ = await post()
    assert (status, headers["x-ratelimit-limit-requests"], headers["x-ratelimit-remaining-requests"]) == (200, "2", "1")
    assert 4900 < int(headers["x-ratelimit-remaining-tokens"]) <= 5000
    status, headers, _ = await post(stream=True)
    assert (status, headers["x-ratelimit-remaining-requests"]) == (200, "0")
    status, headers, text = await post()
    error = json.loads(text)["error"]
    assert (status, error["code"], error["type"]) == (429, "rate_limit_exceeded", "rate_limit_error")
    assert 1 <= int(headers["retry-after"]) <= 30
    assert (headers["x-ratelimit-remaining-requests"], headers["x-ratelimit-limit-tokens"]) == ("0", "5000")
    status, headers, _ = await post(n=0)
    assert (status, headers["x-ratelimit-remaining-requests"]) == (400, "0")
    assert await rate_limited(locked) == 1


async def test_limits_hold_over_grpc_and_are_in_the_trailing_metadata(locked: ScriptedCluster) -> None:
    request = pb.GenerateRequest(model=NAME, text="Say hello", sampling=pb.ClientSampling(max_tokens=50))
    async with grpc.aio.insecure_channel(locked.grpc_address) as channel:
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        for left in ("1", "0"):
            call = stub.Generate(request, metadata=[("x-api-key", "limited")])
            assert [answer async for answer in call]
            assert dict(await call.trailing_metadata())["x-ratelimit-remaining-requests"] == left
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            async for _ in stub.Generate(request, metadata=[("x-api-key", "limited")]):
                pass
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    trailing = dict(refused.value.trailing_metadata() or ())
    assert trailing["x-ratelimit-remaining-requests"] == "0"
    assert "RateLimited" in trailing.values()


async def test_every_grpc_method_but_those_of_health_and_reflection_wants_a_key(locked: ScriptedCluster) -> None:
    """Fails when a service is added without a check of the key."""
    async with locked.channel() as channel:
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        listing = reflection_pb2.ServerReflectionRequest(list_services="")
        [answer] = [each async for each in reflection.ServerReflectionInfo(iter([listing]))]
        services = {each.name for each in answer.list_services_response.service}
        anonymous = {"grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
        assert anonymous < services
        found = {}
        for service in services - anonymous:
            for method in Default().FindServiceByName(service).methods:
                call = channel.unary_stream(f"/{service}/{method.name}")(b"")
                found[method.full_name] = await call.code()
        unknown = channel.unary_unary("/pdserve.v1.InferenceService/Other")(b"")
        assert await unknown.code() is grpc.StatusCode.UNIMPLEMENTED
    names = {f"pdserve.v1.InferenceService.{name}" for name in ("Generate", "Embed", "Resume", "Cancel")}
    assert found == dict.fromkeys(names, grpc.StatusCode.UNAUTHENTICATED)
