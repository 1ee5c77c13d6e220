"""Whose a stream is that goes on at another router, and what it costs: once what an undisturbed one costs."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from pdserve.base.errors import Overloaded
from pdserve.cli.private_redis import PrivateRedis
from tests.integration.router_svc.request.two_routers import Pair, cut, events_of, post, resume, two_routers
from tests.support.depth import IS_FULL
from tests.support.own_task import in_own_task
from tests.support.redis import eventually
from tests.support.tiny_model import NAME

PATH = "/v1/completions"
BODY = {"model": NAME, "prompt": "Say hello", "max_tokens": 40, "stream": True}
PROMPT_TOKENS = 9


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture
async def locked(redis_server: PrivateRedis, model_dir: Path, tmp_path: Path) -> AsyncIterator[Pair]:
    """Keys `a1` and `a2` of a tenant, `b` of another one, `c` with limits, and the operator's key `root`."""
    tenants = {"a1": "team-a", "a2": "team-a", "b": "team-b", "c": "team-c"}
    keys: list[dict[str, Any]] = [
        {"id": name, "sha256": hashlib.sha256(name.encode()).hexdigest(), "tenant": tenant}
        for name, tenant in tenants.items()
    ]
    keys[3] |= {"tokens_per_minute": 1000, "budget": 1000, "parallel": 1, "budget_period": "total"}
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"keys": keys}), encoding="utf-8")
    settings: dict[str, Any] = {"api_key": ("root",), "api_keys_file": str(path)}
    async with in_own_task(two_routers(redis_server, model_dir, **settings)) as pair:
        yield pair


async def usage(pair: Pair) -> list[tuple[object, ...]]:
    """Requests and tokens by key, of both routers."""
    await pair.first.router._usage.flush()
    url = f"{pair.second.base_url}/v1/usage"
    async with pair.second.http.get(url, headers=bearer("root")) as response:
        assert response.status == 200, await response.text()
        rows = (await response.json())["data"]
    names = ("key", "requests", "input_tokens", "cached_tokens", "output_tokens")
    return [tuple(row[name] for name in names) for row in rows]


async def test_a_stream_is_resumed_by_its_tenant_alone(locked: Pair) -> None:
    start = await cut(locked, PATH, BODY, 5, **bearer("a1"), **{"X-Request-Id": "mine"})
    last = events_of(start)[-1][0]
    unknown = await resume(locked.second, "never-was", **bearer("b"))
    for key in ("b", "root", "c"):
        for event in ("", last):
            assert await resume(locked.second, "mine", event, **bearer(key)) == unknown
    assert unknown[0] == 404
    assert (await resume(locked.second, "mine", last))[0] == 401
    assert (await resume(locked.second, "mine", last, **bearer("a2")))[0] == 200
    # Another tenant may have a stream of the same id.
    await post(locked.first, PATH, BODY, **bearer("b"), **{"X-Request-Id": "mine"})
    assert (await resume(locked.second, "mine", **bearer("a1")))[0] == 200


async def limited(pair: Pair) -> tuple[object, object]:
    """What the key with limits has used of its budget, and its open requests."""
    store = pair.second.router._store
    used = await store.call("HGET", store.key("limits:c"), "b")
    return used, await store.call("ZCARD", store.key("leases:c"))


full = pytest.mark.skipif(not IS_FULL, reason="one of many cases: `make test-all ARGS=full-depth` runs it")


@pytest.mark.parametrize(
    "how", ["lost", "left", pytest.param("moved", marks=full), pytest.param("complete", marks=full)]
)
async def test_a_request_is_charged_once_however_its_stream_moves(locked: Pair, how: str) -> None:
    """The router was killed; the client left and came back; the client came back while it ran; it had ended."""
    headers = {**bearer("c"), "X-Request-Id": "once"}
    if how == "complete":
        start = await post(locked.first, PATH, BODY, **headers)
        last = events_of(start)[3][0]
    elif how == "moved":
        locked.first.script.pace = pace = asyncio.Semaphore(4)
        async with locked.first.http.post(locked.first.base_url + PATH, json=BODY, headers=headers) as old:
            await old.content.readany()

            async def is_kept() -> bool:
                return await locked.kept() > 0

            await eventually(is_kept)
            resumed = asyncio.create_task(resume(locked.second, "once", **bearer("c")))
            assert b"has resumed it" in await old.read(), "within a second"
        locked.first.script.pace = None
        for _ in range(50):
            pace.release()
        assert (await resumed)[0] == 200
        last = ""
    else:
        start = await cut(locked, PATH, BODY, 5, is_lost=how == "lost", **headers)
        last = events_of(start)[-1][0]
    if last:
        status, _ = await resume(locked.second, "once", last, **bearer("c"))
        assert status == 200
    output_tokens = len(locked.first.script.replies[0])
    total = PROMPT_TOKENS + output_tokens

    async def is_settled() -> bool:
        return await limited(locked) == (str(total).encode(), 0)

    await eventually(is_settled)
    assert await usage(locked) == [("c", 1, PROMPT_TOKENS, 0, output_tokens)]
    # Reading it again costs nothing.
    assert (await resume(locked.second, "once", **bearer("c")))[0] == 200
    assert await usage(locked) == [("c", 1, PROMPT_TOKENS, 0, output_tokens)]


@full
async def test_a_resumed_stream_counts_among_the_requests_at_a_time(locked: Pair) -> None:
    start = await cut(locked, PATH, BODY, 5, is_lost=False, **bearer("c"), **{"X-Request-Id": "first"})
    locked.first.script.pace = pace = asyncio.Semaphore(2)
    async with locked.first.http.post(
        locked.first.base_url + PATH, json=BODY, headers={**bearer("c"), "X-Request-Id": "second"}
    ) as running:
        assert running.status == 200, "the one before has ended"
        await running.content.readany()
        status, text = await resume(locked.second, "first", events_of(start)[-1][0], **bearer("c"))
        assert status == 429, text
        for _ in range(50):
            pace.release()
        await running.read()
    locked.first.script.pace = None

    async def is_resumed() -> bool:
        return (await resume(locked.second, "first", events_of(start)[-1][0], **bearer("c")))[0] == 200

    await eventually(is_resumed)


@pytest.mark.parametrize("where", ["first", "second"])
async def test_a_resume_for_which_there_is_no_room_leaves_the_stream_and_its_reservation(
    locked: Pair, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails when the reservation is adopted before the stream is taken: nobody renewed or settled it."""
    headers = {**bearer("c"), "X-Request-Id": "healthy"}
    router = locked.first if where == "first" else locked.second
    locked.first.script.pace = pace = asyncio.Semaphore(3)

    def refuse(*arguments: object) -> None:
        raise Overloaded("no room", retry_after_s=1.0)

    async with locked.first.http.post(locked.first.base_url + PATH, json=BODY, headers=headers) as response:
        await response.content.readany()

        async def is_kept() -> bool:
            return await locked.kept() > 0

        await eventually(is_kept)
        with monkeypatch.context() as patch:
            patch.setattr(router.router.models.first.gate, "enter", refuse)
            assert (await resume(router, "healthy", **bearer("c")))[0] == 429
        assert (await limited(locked))[1] == 1
        for _ in range(50):
            pace.release()
        assert b"[DONE]" in await response.read()
    total = PROMPT_TOKENS + len(locked.first.script.replies[0])

    async def is_settled() -> bool:
        return await limited(locked) == (str(total).encode(), 0)

    await eventually(is_settled)


async def test_a_stream_that_is_resumed_on_its_own_router_is_settled_once(locked: Pair) -> None:
    """Fails when the old request, which ends within a second, takes the reservation of the new one with it."""
    headers = {**bearer("c"), "X-Request-Id": "again"}
    locked.first.script.pace = pace = asyncio.Semaphore(3)
    async with locked.first.http.post(locked.first.base_url + PATH, json=BODY, headers=headers) as old:
        await old.content.readany()

        async def is_kept() -> bool:
            return await locked.kept() > 0

        await eventually(is_kept)
        resumed = asyncio.create_task(resume(locked.first, "again", **bearer("c")))
        assert b"has resumed it" in await old.read(), "within a second"
    for _ in range(100):
        pace.release()
    assert (await resumed)[0] == 200
    total = PROMPT_TOKENS + len(locked.first.script.replies[0])

    async def is_settled() -> bool:
        return await limited(locked) == (str(total).encode(), 0)

    await eventually(is_settled)
