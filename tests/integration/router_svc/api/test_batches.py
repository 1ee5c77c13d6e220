"""/v1/batches with OpenAI's client, on both kinds of store: results, cancellation, and routers that are lost."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pdserve.base.errors import StoreError
from pdserve.cli.private_redis import PrivateRedis
from router_svc.api.batches import batch_runs, input_lines
from router_svc.api.batches.batch_runs import BatchRuns
from router_svc.api.batches.results import Results
from router_svc.state import claim
from tests.integration.router_svc.api.conftest import TEMPLATE
from tests.integration.router_svc.api.test_reference import description_of
from tests.integration.router_svc.conftest import ScriptedCluster, open_cluster
from tests.integration.router_svc.script import hang
from tests.support.lazily import openai
from tests.support.own_task import in_own_task
from tests.support.redis import eventually
from tests.support.tiny_model import END, NAME, tokens_of, write_model

BOTH = pytest.mark.parametrize("kind", ["redis", "directory"])
COMPLETIONS = "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"model": NAME, "prompt": "Say hello", "max_tokens": 50},
    "/v1/chat/completions": {"model": NAME, "messages": [{"role": "user", "content": "Hi"}]},
    "/v1/responses": {"model": NAME, "input": "Hi"},
}


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks for work that other routers have left, and renews claims, as often as a test would have to wait for it."""
    monkeypatch.setattr(batch_runs, "_SWEEP_S", 0.02)
    monkeypatch.setattr(claim, "_RENEWAL_S", 0.02)


@asynccontextmanager
async def _opened(redis: PrivateRedis, directory: Path, **settings: Any) -> AsyncIterator[ScriptedCluster]:
    model = write_model(directory / NAME)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    async with in_own_task(open_cluster(redis, model, {"decode-0": "decode"}, **settings)) as cluster:
        cluster.script.replies = [[*tokens_of("Hello."), END]]
        yield cluster


@pytest.fixture
async def stored(redis_server: PrivateRedis, tmp_path: Path, state_url: str) -> AsyncIterator[ScriptedCluster]:
    async with _opened(redis_server, tmp_path, state_url=state_url) as cluster:
        yield cluster


def line(custom_id: str, url: str = COMPLETIONS, **changes: object) -> bytes:
    fields = {"custom_id": custom_id, "method": "POST", "url": url, "body": BODIES[url] | changes}
    return json.dumps(fields).encode() + b"\n"


async def _start(client: openai.AsyncOpenAI, content: bytes, url: Any = COMPLETIONS) -> str:
    file = await client.files.create(file=("in.jsonl", content), purpose="batch")
    batch = await client.batches.create(
        input_file_id=file.id, endpoint=url, completion_window="24h", metadata={"for": "a test"}
    )
    assert batch.status == "validating"
    assert batch.metadata == {"for": "a test"}
    return batch.id


async def _ended(client: openai.AsyncOpenAI, batch_id: str) -> Any:
    batch: Any = None

    async def has_ended() -> bool:
        nonlocal batch
        batch = await client.batches.retrieve(batch_id)
        return batch.status in ("completed", "failed", "expired", "cancelled")

    await eventually(has_ended)
    return batch


async def _results(client: openai.AsyncOpenAI, file_id: str | None) -> dict[str, Any]:
    if file_id is None:
        return {}
    text = (await client.files.content(file_id)).text
    lines = [json.loads(each) for each in text.splitlines()]
    found = {each["custom_id"]: each for each in lines}
    assert len(found) == len(lines)
    return found


@BOTH
async def test_every_request_has_a_result_of_its_endpoint(stored: ScriptedCluster) -> None:
    for url in BODIES:
        await _check_results(stored, url)


async def _check_results(stored: ScriptedCluster, url: str) -> None:
    bad = line("bad", url, temperature=-1)
    async with stored.client() as client:
        batch_id = await _start(client, line("a", url) + bad + b"\n" + line("b", url), url)
        batch = await _ended(client, batch_id)
        assert batch.status == "completed"
        counts = batch.request_counts
        assert (counts.total, counts.completed, counts.failed) == (3, 2, 1)
        found = await _results(client, batch.output_file_id)
        errors = await _results(client, batch.error_file_id)
    assert found.keys() == {"a", "b"}
    backend = stored.router._batches
    assert backend is not None
    # A chunk grows with the results, instead of one for each.
    assert len((await backend.stored.files.find("", batch.output_file_id)).chunks) == 1
    status, whole = await stored.post(url, BODIES[url])
    assert status == 200
    for result in found.values():
        assert (result["response"]["status_code"], result["error"]) == (200, None)
        body = result["response"]["body"]
        assert body.keys() == whole.keys()
        assert body["usage"]["total_tokens"] == whole["usage"]["total_tokens"]
        for name in ("choices", "status"):
            assert body.get(name) == whole.get(name)
    [error] = errors.values()
    assert (error["custom_id"], error["response"]["status_code"]) == ("bad", 400)
    assert error["response"]["body"]["error"]["param"] == "temperature"
    assert batch.in_progress_at <= batch.finalizing_at <= batch.completed_at < batch.expires_at


#: Files that are wrong, with what is said of which line.
WRONG: list[tuple[bytes, str, int | None]] = [
    (line("a") + b"{\n", "It is not JSON", 2),
    (line("a") + line("a"), "that of an earlier line", 2),
    (line("a", "/v1/responses"), "is not the endpoint of the batch", 1),
    (line("a", stream=True), "body.stream", 1),
    (b"\n", "no requests", None),
    (line("a") + line("b") + line("c"), "more than 2 requests", None),
]


async def test_nothing_runs_of_a_file_that_is_wrong(stored: ScriptedCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_lines, "MAX_LINES", 2)
    async with stored.client() as client:
        for content, message, number in WRONG:
            batch = await _ended(client, await _start(client, content))
            assert batch.status == "failed"
            [error] = batch.errors.data
            assert message in error.message
            assert error.line == number
    assert stored.calls.decode_starts == []


async def test_a_request_that_a_batch_cannot_have_fails_alone(stored: ScriptedCluster) -> None:
    content = line("a", "/v1/responses", store=True) + line("b", "/v1/responses", priority=-5)
    async with stored.client() as client:
        batch = await _ended(client, await _start(client, content, "/v1/responses"))
        errors = await _results(client, batch.error_file_id)
    assert (batch.status, batch.output_file_id) == ("completed", None)
    assert [errors[each]["response"]["body"]["error"]["param"] for each in "ab"] == ["store", "priority"]


async def test_a_batch_lets_all_others_pass_and_runs_no_more_at_a_time_than_the_flag_says(
    redis_server: PrivateRedis, tmp_path: Path, state_url: str
) -> None:
    settings = {"state_url": state_url, "batch_max_num_seqs": 2}
    async with _opened(redis_server, tmp_path, **settings) as cluster, cluster.client() as client:
        cluster.script.fail("decode_token", *[hang] * 2)
        batch_id = await _start(client, b"".join(line(str(number)) for number in range(4)))
        gate = cluster.router.models.first.gate

        async def two_run() -> bool:
            return gate.num_admitted == 2

        await eventually(two_run)
        assert (await cluster.complete())[0] == 200
        assert (gate.num_admitted, gate.num_waiting) == (2, 0)
        assert len(cluster.calls.decode_starts) == 3
        # No capacity: what waits is admitted by its priority, not by its arrival.
        gate.set_capacity(2)
        await client.batches.cancel(batch_id)
        gate.set_capacity(0)
        order: list[str] = []
        batch_id = await _start(client, line("late"))

        async def waits() -> bool:
            return gate.num_waiting == 1

        await eventually(waits)

        async def complete() -> None:
            await cluster.complete()
            order.append("interactive")

        waiting = asyncio.create_task(complete())

        async def both_wait() -> bool:
            return gate.num_waiting == 2

        await eventually(both_wait)
        batch_slot = max(gate._queue._waiting, key=lambda slot: slot.priority)
        assert list(gate._queue._waiting)[-1] is batch_slot
        assert batch_slot.priority > 2**31 - 1
        gate.set_capacity(1)
        await waiting
        assert (await _ended(client, batch_id)).status == "completed"


@BOTH
async def test_a_cancelled_batch_keeps_its_results(stored: ScriptedCluster) -> None:
    async with stored.client() as client:
        stored.script.fail("decode_token", *[None] * 7, hang)
        batch_id = await _start(client, line("a") + line("b"))

        async def has_one() -> bool:
            return (await client.batches.retrieve(batch_id)).request_counts.completed == 1  # type: ignore[union-attr]

        await eventually(has_one)
        batch = await client.batches.cancel(batch_id)
        assert batch.status == "cancelled"
        assert (await client.batches.cancel(batch_id)).cancelled_at == batch.cancelled_at
        assert (await _results(client, batch.output_file_id)).keys() == {"a"}
    assert stored.router.models.first.gate.num_admitted == 0


def _runs(cluster: ScriptedCluster) -> BatchRuns:
    backend = cluster.router._batches
    assert backend is not None
    return backend.runs


@BOTH
async def test_a_router_goes_on_with_a_batch_and_does_no_line_twice(
    redis_server: PrivateRedis, tmp_path: Path, state_url: str
) -> None:
    content = b"".join(line(name, **({"temperature": -1} if name == "c" else {})) for name in "acbd")
    settings = {"state_url": state_url, "batch_max_num_seqs": 1}
    async with _opened(redis_server, tmp_path, **settings) as lost, lost.client() as client:
        lost.script.fail("decode_token", *[None] * 7, hang)
        batch_id = await _start(client, content)

        async def has_two() -> bool:
            counts: Any = (await client.batches.retrieve(batch_id)).request_counts
            return (counts.completed, counts.failed) == (1, 1)

        await eventually(has_two)
        runs = _runs(lost)
        if state_url.startswith("file:"):
            assert runs._group is not None
            runs._group.stop()
        else:
            runs.drain()

        async def is_handed_back() -> bool:
            return len(await runs._state.unclaimed()) == 1

        await eventually(is_handed_back)
        assert lost.router.models.first.gate.num_admitted == 0
    async with _opened(redis_server, tmp_path, state_url=state_url) as other, other.client() as client:
        batch = await _ended(client, batch_id)
        assert batch.status == "completed"
        assert (await _results(client, batch.output_file_id)).keys() == set("abd")
        assert (await _results(client, batch.error_file_id)).keys() == {"c"}
        assert (batch.request_counts.completed, batch.request_counts.failed) == (3, 1)
        assert len(other.calls.decode_starts) == 2


async def test_a_router_that_has_lost_its_claim_writes_nothing_more(stored: ScriptedCluster) -> None:
    async with stored.client() as client:
        stored.script.fail("decode_token", hang)
        batch_id = await _start(client, line("a"))
        runs = _runs(stored)

        async def runs_it() -> bool:
            return stored.router.models.first.gate.num_admitted == 1

        await eventually(runs_it)
        [key] = runs._running
        state: Any = runs._state
        holder = (await state._store.call("GET", state._keys(key)[2])).decode()
        # At once: one that is released is claimed again when it is renewed.
        await state._store.call("SET", state._keys(key)[2], "other")
        stored.script.fail("decode_token")
        record = await runs._batches.read(key)
        assert record is not None
        results = batch_runs.Results(runs._batches, record, holder)
        with pytest.raises(batch_runs.StaleError):
            await results.add(batch_runs.Result(b"x\n", is_success=True))
        after = await runs._batches.read(key)
        assert after == record
        await state.release(key, "other")
        await client.batches.cancel(batch_id)


async def test_a_batch_whose_routers_were_lost_three_times_fails(
    stored: ScriptedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_runs, "MAX_RUNNING", 0)
    async with stored.client() as client:
        batch_id = await _start(client, line("a"))
        runs = _runs(stored)
        [key] = await runs._state.unclaimed()
        assert await runs._state.claim(key, "lost")
        record = await runs._batches.read(key)
        assert record is not None
        await runs._batches.update(replace(record, attempts=batch_runs.MAX_ATTEMPTS), "lost")
        await runs._state.release(key, "lost")
        monkeypatch.setattr(batch_runs, "MAX_RUNNING", 8)
        batch = await _ended(client, batch_id)
    assert batch.status == "failed"
    assert "3 routers" in batch.errors.data[0].message
    assert stored.calls.decode_starts == []


@pytest.mark.parametrize("kind", ["directory"])
@pytest.mark.parametrize("error", [StoreError("it is away"), RuntimeError("it broke")])
async def test_a_batch_that_is_interrupted_goes_on(
    stored: ScriptedCluster, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """The claim of a directory does not expire, so that a run gives it back however it ends."""
    errors, done = [error], Results.done

    async def failing_once(results: Results) -> set[str]:
        if errors:
            raise errors.pop()
        return await done(results)

    monkeypatch.setattr(Results, "done", failing_once)
    async with stored.client() as client:
        batch = await _ended(client, await _start(client, line("a")))
    assert (batch.status, batch.request_counts.completed) == ("completed", 1)


async def test_a_batch_expires_and_one_without_a_router_is_cancelled(
    stored: ScriptedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_runs, "MAX_RUNNING", 0)
    async with stored.client() as client:
        unclaimed, late = await _start(client, line("a")), await _start(client, line("a"))
        assert (await client.batches.cancel(unclaimed)).status == "cancelled"
        runs = _runs(stored)
        [key] = await runs._state.unclaimed()
        assert await runs._state.claim(key, "x")
        record = await runs._batches.read(key)
        assert record is not None
        await runs._batches.update(replace(record, expires_at=record.created_at), "x")
        await runs._state.release(key, "x")
        monkeypatch.setattr(batch_runs, "MAX_RUNNING", 8)
        assert (await _ended(client, late)).status == "expired"
        listed = [batch.id async for batch in client.batches.list(limit=1)]
        assert sorted(listed) == sorted([unclaimed, late])


async def test_a_tenant_has_its_own_batches(redis_server: PrivateRedis, tmp_path: Path, state_url: str) -> None:
    keys = tmp_path / "keys.json"
    entries = [{"id": n, "tenant": n, "sha256": hashlib.sha256(n.encode()).hexdigest()} for n in "ab"]
    keys.write_text(json.dumps({"keys": entries}))
    async with _opened(redis_server, tmp_path, state_url=state_url, api_keys_file=str(keys)) as cluster:
        a, b = (openai.AsyncOpenAI(base_url=f"{cluster.base_url}/v1", api_key=n, max_retries=0) for n in "ab")
        async with a, b:
            batch = await _ended(a, await _start(a, line("x")))
            assert batch.status == "completed"
            for ask in (b.batches.retrieve, b.batches.cancel):
                with pytest.raises(openai.NotFoundError):
                    await ask(batch.id)
            with pytest.raises(openai.NotFoundError):
                await b.files.content(batch.output_file_id)
            with pytest.raises(openai.NotFoundError):
                await b.batches.create(input_file_id=batch.input_file_id, endpoint=COMPLETIONS, completion_window="24h")
            assert (await b.batches.list()).data == []
            with pytest.raises(openai.BadRequestError, match="result of a batch"):
                await a.batches.create(
                    input_file_id=batch.output_file_id, endpoint=COMPLETIONS, completion_window="24h"
                )


async def test_answers_are_as_described(stored: ScriptedCluster) -> None:
    described = await description_of(stored.base_url)
    async with stored.client() as client:
        batch_id = await _start(client, line("a") + line("b", temperature=-1))
        batch = await _ended(client, batch_id)
    body = {"input_file_id": batch.input_file_id, "endpoint": COMPLETIONS, "completion_window": "24h"}
    for method, path, sent in (
        ("POST", "", body),
        ("GET", "", None),
        ("GET", "/{id}", None),
        ("POST", "/{id}/cancel", None),
    ):
        url = f"{stored.base_url}/v1/batches{path}".replace("{id}", batch_id)
        async with stored.http.request(method, url, json=sent) as response:
            assert response.status == 200, await response.text()
            described.check((method, f"/v1/batches{path}"), 200, response.headers, await response.read())
