"""The OpenAPI document of a running router: its routes, its keys, and the answers that it really gives."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from pdserve.base.errors import PeerLost
from pdserve.cli.private_redis import PrivateRedis
from router_svc.api.reference.operations import OPERATIONS
from tests.integration.router_svc.conftest import ScriptedCluster, in_own_task, open_cluster
from tests.integration.router_svc.script import failing
from tests.support.described import Description
from tests.support.tiny_model import END, NAME, tokens_of

ONE_OF_EACH = {"prefill-0": "prefill", "decode-0": "decode"}
USER = {"role": "user", "content": "Say hello"}
TEXT: dict[str, Any] = {"model": NAME, "prompt": "Say hello", "max_tokens": 50}
CHAT: dict[str, Any] = {"model": NAME, "messages": [USER]}
DECISION = {
    "model": NAME,
    "input": "x",
    "questions": [
        {"type": "predicate", "name": "a", "instructions": "Is it?"},
        {"type": "choice", "instructions": "Which?", "choices": [{"value": "a", "description": "b"}, {"value": True}]},
        {"type": "score", "instructions": "How?", "levels": [{"label": "a"}, {"label": "b"}]},
    ],
}
MESSAGE = CHAT | {"max_tokens": 50, "beta": True}


@pytest.fixture
async def locked(redis_server: PrivateRedis, model_dir: Path) -> AsyncIterator[ScriptedCluster]:
    """A router that asks for the key `root`."""
    opened = open_cluster(redis_server, model_dir, ONE_OF_EACH, api_key=("root",))  # type: ignore[arg-type]
    async with in_own_task(opened) as cluster:
        yield cluster


async def description_of(url: str) -> Description:
    async with aiohttp.ClientSession() as http, http.get(f"{url}/openapi.json") as response:
        assert (response.status, response.content_type) == (200, "application/json")
        return Description(await response.json())


def served(cluster: ScriptedCluster) -> set[tuple[str, str]]:
    """What the API's listener has in its table of routes, apart from answers that lead to the admin port."""
    app = cluster.router._front()._public_app()
    routes = [route for route in app.router.routes() if "_elsewhere" not in route.handler.__qualname__]
    return {(route.method, route.resource.canonical) for route in routes if route.resource is not None}


@pytest.mark.parametrize("settings", [{}, {"console": False}, {"admin_port": 0}], ids=["one", "no-console", "admin"])
async def test_the_document_has_every_route_and_no_other(
    redis_server: PrivateRedis, model_dir: Path, settings: dict[str, Any]
) -> None:
    async with open_cluster(redis_server, model_dir, ONE_OF_EACH, **settings) as cluster:  # type: ignore[arg-type]
        public = await description_of(cluster.base_url)
        heads = {("HEAD", path) for method, path in public.operations if method == "GET"} - {
            ("HEAD", "/console/events")
        }
        assert {*public.operations} | heads == served(cluster)
        if "admin_port" in settings:
            admin = await description_of(cluster.admin_url)
            assert {*admin.operations} == {*OPERATIONS}
            assert ("GET", "/v1/cluster") not in public.operations
        elif not settings:
            assert {*public.operations} == {*OPERATIONS}
        else:
            assert {path for _, path in OPERATIONS} - {path for _, path in public.operations} == {
                "/console",
                "/console/",
                "/console/{name}",
                "/console/events",
            }


async def test_the_document_and_its_page_need_no_key_and_all_else_does_as_described(locked: ScriptedCluster) -> None:
    described = await description_of(locked.base_url)
    for (method, path), operation in described.operations.items():
        address = locked.base_url + path.replace("{id}", "x").replace("{name}", "docs.js")
        async with locked.http.request(method, address, json={}, allow_redirects=False) as response:
            assert (response.status == 401) == ("security" not in operation), path
            described.check((method, path), response.status, response.headers, await response.read())


#: Requests, each with the status of its answer. Together they reach every operation.
RESPONSE = {"model": NAME, "input": "Hi", "instructions": "x", "max_output_tokens": 8, "client_metadata": {}}
REQUESTS: list[tuple[str, str, object, int]] = [
    ("POST", "/v1/completions", TEXT, 200),
    ("POST", "/v1/completions", TEXT | {"logprobs": 2, "n": 2}, 200),
    ("POST", "/v1/completions", TEXT | {"echo": True, "stop": "wor"}, 200),
    ("POST", "/v1/completions", TEXT | {"stream": True}, 200),
    ("POST", "/v1/completions", TEXT | {"stream": True, "echo": True}, 200),
    ("POST", "/v1/completions", TEXT | {"stream": True, "logprobs": 1, "stream_options": {"include_usage": True}}, 200),
    ("POST", "/v1/completions", TEXT | {"return_token_ids": True, "truncate_prompt_tokens": 3}, 200),
    ("POST", "/v1/completions", TEXT | {"return_token_ids": True, "stream": True}, 200),
    ("POST", "/v1/completions", TEXT | {"model": "other"}, 404),
    ("POST", "/v1/completions", TEXT | {"n": 0}, 400),
    ("POST", "/v1/completions", TEXT | {"n": 100, "max_tokens": 200, "logprobs": 20}, 413),
    ("POST", "/v1/chat/completions", CHAT, 200),
    ("POST", "/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 2}, 200),
    ("POST", "/v1/chat/completions", CHAT | {"stream": True, "logprobs": True}, 200),
    (
        "POST",
        "/v1/chat/completions",
        CHAT | {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        200,
    ),
    ("POST", "/v1/chat/completions", CHAT | {"return_token_ids": True}, 200),
    ("POST", "/v1/chat/completions", CHAT | {"return_token_ids": True, "stream": True, "n": 2}, 200),
    ("POST", "/v1/chat/completions", {}, 400),
    ("POST", "/v1/responses", RESPONSE, 200),
    ("POST", "/v1/responses", RESPONSE | {"stream": True}, 200),
    ("POST", "/v1/responses", RESPONSE | {"store": True}, 400),
    ("GET", "/v1/responses/resp_1", None, 404),
    ("DELETE", "/v1/responses/resp_1", None, 404),
    ("POST", "/v1/responses/resp_1/cancel", None, 404),
    ("GET", "/v1/responses/resp_1/input_items", None, 404),
    ("POST", "/v1/files", {}, 404),
    ("GET", "/v1/files", None, 404),
    ("GET", "/v1/files/file-" + "0" * 32, None, 404),
    ("DELETE", "/v1/files/file-" + "0" * 32, None, 404),
    ("GET", "/v1/files/file-" + "0" * 32 + "/content", None, 404),
    ("POST", "/v1/batches", {}, 404),
    ("GET", "/v1/batches", None, 404),
    ("GET", "/v1/batches/batch_" + "0" * 32, None, 404),
    ("POST", "/v1/batches/batch_" + "0" * 32 + "/cancel", None, 404),
    ("POST", "/v1/messages", MESSAGE, 200),
    ("POST", "/v1/messages", MESSAGE | {"stream": True, "stop_sequences": ["wor"]}, 200),
    ("POST", "/v1/messages", MESSAGE | {"model": "other"}, 404),
    ("POST", "/v1/messages", CHAT, 400),
    ("POST", "/v1/messages/count_tokens", CHAT, 200),
    ("POST", "/v1/messages/count_tokens", {}, 400),
    ("POST", "/api/chat", CHAT, 200),
    ("POST", "/api/chat", CHAT | {"stream": False, "keep_alive": 0, "format": "json"}, 200),
    ("POST", "/api/chat", CHAT | {"model": "other"}, 404),
    ("POST", "/api/chat", CHAT | {"think": True}, 400),
    ("POST", "/api/generate", TEXT, 200),
    ("POST", "/api/generate", TEXT | {"raw": True, "stream": False, "options": {"num_predict": 3}}, 200),
    ("POST", "/api/generate", {}, 400),
    ("POST", "/api/show", {"model": NAME, "verbose": True}, 200),
    ("POST", "/api/show", {"model": "other"}, 404),
    ("POST", "/api/chat", CHAT | {"logprobs": True, "top_logprobs": 1, "stream": False}, 200),
    ("POST", "/api/generate", TEXT | {"logprobs": True}, 200),
    ("POST", "/api/embed", {"model": NAME, "input": ["Say", "hello"], "dimensions": 3, "keep_alive": 0}, 200),
    ("POST", "/api/embed", {"model": NAME, "input": []}, 400),
    ("POST", "/api/embeddings", {"model": NAME, "prompt": "Say"}, 200),
    ("POST", "/api/embeddings", {"model": "other", "prompt": "Say"}, 404),
    ("GET", "/", None, 200),
    ("GET", "/api/tags", None, 200),
    ("GET", "/api/ps", None, 200),
    ("GET", "/api/version", None, 200),
    ("POST", "/v1/embeddings", {"model": NAME, "input": ["Say", "hello"], "encoding_format": "base64"}, 200),
    ("POST", "/v1/embeddings", {"model": NAME, "input": [65, 66], "dimensions": 3, "pooling": "mean"}, 200),
    ("POST", "/v1/embeddings", {"model": NAME, "input": "x", "dimensions": 17}, 400),
    ("POST", "/v1/score", {"model": NAME, "text_1": "Say", "text_2": ["hello", "Say"]}, 200),
    ("POST", "/v1/score", {"model": NAME, "text_1": ["a", "b"], "text_2": ["c"] * 3}, 400),
    ("POST", "/v1/rerank", {"model": NAME, "query": "Say", "documents": ["hello", {"text": "Say"}]}, 200),
    ("POST", "/v1/rerank", {"model": NAME, "query": "Say", "documents": ["x"] * 512}, 400),
    ("POST", "/v1/decisions", DECISION, 200),
    ("POST", "/v1/decisions", DECISION | {"questions": []}, 400),
    ("POST", "/tokenize", {"prompt": "x", "return_token_strs": True}, 200),
    ("POST", "/tokenize", {"messages": [USER]}, 200),
    ("POST", "/detokenize", {"tokens": [65]}, 200),
    ("POST", "/detokenize", {"tokens": [65] * 300}, 413),
    ("GET", "/v1/models", None, 200),
    ("GET", f"/v1/models/{NAME}", None, 200),
    ("GET", "/v1/models/org/other", None, 404),
    ("GET", "/version", None, 200),
    ("GET", "/tokenizer_info", None, 200),
    ("GET", "/livez", None, 200),
    ("GET", "/readyz", None, 200),
    ("GET", "/health", None, 200),
    ("GET", "/metrics", None, 200),
    ("GET", "/v1/cluster", None, 200),
    ("GET", "/v1/requests", None, 200),
    ("GET", "/v1/requests?limit=1", None, 200),
    ("GET", "/v1/requests?limit=0", None, 400),
    ("POST", "/v1/requests/unknown/cancel", None, 404),
    ("POST", "/v1/requests/un%20known/cancel", None, 400),
    ("GET", "/v1/requests/unknown/stream", None, 404),
    ("GET", "/v1/requests/unknown/trace", None, 404),
    ("GET", "/v1/requests/un%20known/trace", None, 400),
    ("GET", "/v1/usage", None, 200),
    ("GET", "/v1/usage?from=2026-11-01&to=2026-11-30&format=csv", None, 200),
    ("GET", "/v1/usage?from=2026-02-30", None, 400),
    ("GET", "/console", None, 308),
    ("GET", "/console/", None, 200),
    ("GET", "/console/main.js", None, 200),
    ("GET", "/console/other.js", None, 404),
    ("GET", "/docs", None, 308),
    ("GET", "/docs/", None, 200),
    ("GET", "/docs/docs.js", None, 200),
    ("GET", "/docs/other.js", None, 404),
    ("GET", "/openapi.json", None, 200),
]


async def test_answers_are_as_described(small_cluster: ScriptedCluster) -> None:
    cluster = small_cluster
    described = await description_of(cluster.base_url)
    reached = set()
    for method, path, body, expected in REQUESTS:
        known = described.find(method, path.partition("?")[0])
        assert known is not None, path
        reached.add(known)
        async with cluster.http.request(method, cluster.base_url + path, json=body, allow_redirects=False) as response:
            content = await response.read()
            assert response.status == expected, (path, body, content)
            described.check(known, response.status, response.headers, content)
    assert {*described.operations} - reached == {
        ("GET", "/v1/requests/{id}/trace"),
        ("GET", "/console/events"),
    } - reached
    requests = (await cluster.get("/v1/requests?limit=1000"))[1]["requests"]
    for request_id in (each["request_id"] for each in requests):
        async with cluster.http.get(f"{cluster.base_url}/v1/requests/{request_id}/trace") as response:
            assert response.status == 200
            known = ("GET", "/v1/requests/{id}/trace")
            described.check(known, response.status, response.headers, await response.read())
    async with cluster.http.post(f"{cluster.base_url}/v1/requests/{requests[0]['request_id']}/cancel") as response:
        assert response.status == 200
        known = ("POST", "/v1/requests/{id}/cancel")
        described.check(known, response.status, response.headers, await response.read())


#: Requests with a function `put`, in the form of each API.
WITH_TOOLS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT | {"tools": [{"type": "function", "function": {"name": "put"}}]},
    "/v1/responses": {"model": NAME, "input": "Hi", "tools": [{"type": "function", "name": "put"}]},
    "/v1/messages": CHAT
    | {"tools": [{"name": "put", "input_schema": {"type": "object"}}], "max_tokens": 150}
    | {"thinking": {"type": "adaptive"}},
    "/api/chat": CHAT | {"tools": [{"type": "function", "function": {"name": "put"}}], "think": True},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", WITH_TOOLS)
async def test_thinking_and_calls_are_as_described(thinker: ScriptedCluster, path: str, stream: bool) -> None:
    described = await description_of(thinker.base_url)
    call = '<tool_call>\n{"name": "put", "arguments": {"a": 1}}\n</tool_call>'
    thinker.script.replies = [[*tokens_of(f"<think>\nHm.\n</think>\n\nHello. {call}\n{call}"), END]]
    async with thinker.http.post(thinker.base_url + path, json=WITH_TOOLS[path] | {"stream": stream}) as response:
        content = await response.read()
        assert response.status == 200, content
        assert b"Hm." in content or stream
        assert content.count(b'"put"') >= 2
        described.check(("POST", path), response.status, response.headers, content)


async def test_the_events_of_the_console_are_as_described(small_cluster: ScriptedCluster) -> None:
    described = await description_of(small_cluster.base_url)
    await small_cluster.complete()
    async with small_cluster.http.get(f"{small_cluster.base_url}/console/events") as response:
        first = await response.content.readuntil(b"\n\n")
        described.check(("GET", "/console/events"), response.status, response.headers, first)
        assert b"event: state" in first


async def test_a_head_request_takes_no_slot_of_a_console(small_cluster: ScriptedCluster) -> None:
    async with small_cluster.http.head(f"{small_cluster.base_url}/console/events") as response:
        assert response.status == 404
    assert small_cluster.router._console is not None
    assert small_cluster.router._console.feed.num_readers == 0


@pytest.mark.parametrize(
    ("path", "body", "late", "overloaded"),
    [
        ("/v1/completions", TEXT, b'{"error":', 503),
        ("/v1/messages", MESSAGE, b'{"type":"error"', 529),
        ("/api/chat", CHAT, b'{"error":"', 503),
    ],
)
async def test_errors_of_the_cluster_are_as_described(
    cluster: ScriptedCluster, path: str, body: dict[str, Any], late: bytes, overloaded: int
) -> None:
    described = await description_of(cluster.base_url)
    known = ("POST", path)
    # Every attempt fails. The first token may be with the client by then, or not.
    cluster.script.fail("decode_token", *[failing(PeerLost("the peer is gone"))] * 1000)
    async with cluster.http.post(cluster.base_url + path, json=body | {"stream": True, "timeout": 0.5}) as response:
        content = await response.read()
        assert response.status in (200, 504)
        assert late in content
        described.check(known, response.status, response.headers, content)
    cluster.router.models.first.requests.drain()
    async with cluster.http.post(cluster.base_url + path, json=body) as response:
        assert response.status == overloaded
        described.check(known, response.status, response.headers, await response.read())


async def test_a_known_document_is_not_sent_again(small_cluster: ScriptedCluster) -> None:
    url = f"{small_cluster.base_url}/openapi.json"
    async with small_cluster.http.get(url) as first:
        tag = first.headers["ETag"]
    async with small_cluster.http.get(url, headers={"If-None-Match": tag}) as again:
        assert (again.status, await again.read()) == (304, b"")


async def test_metrics_are_described_in_both_formats(small_cluster: ScriptedCluster) -> None:
    """Found by fuzzing: the document had the text format only."""
    described = await description_of(small_cluster.base_url)
    for accept in ("text/plain", "application/openmetrics-text; version=1.0.0"):
        async with small_cluster.http.get(f"{small_cluster.base_url}/metrics", headers={"Accept": accept}) as response:
            assert response.content_type == accept.partition(";")[0]
            described.check(("GET", "/metrics"), response.status, response.headers, await response.read())
