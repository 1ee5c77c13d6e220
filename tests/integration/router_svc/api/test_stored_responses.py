"""Responses that are stored: read, gone on from, followed, cancelled and deleted, in a Redis and in a directory."""

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

from pdserve.base.tasks import service_group
from pdserve.cli.private_redis import PrivateRedis
from router_svc.api.responses.background import MAX_ATTEMPTS, BackgroundRuns
from router_svc.state import claim
from router_svc.state.claim import claiming
from router_svc.state.response_record import record_key
from router_svc.state.state_store import Stage
from tests.integration.router_svc.api.conftest import TEMPLATE
from tests.integration.router_svc.conftest import ScriptedCluster, open_cluster
from tests.integration.router_svc.request.support import ONE_OF_EACH
from tests.integration.router_svc.script import Script, hang
from tests.support.lazily import openai
from tests.support.own_task import in_own_task
from tests.support.redis import eventually
from tests.support.tiny_model import END, NAME, tokens_of, write_model

#: Both kinds of store where a router makes a difference between them. `test_state_stores.py` has what they do.
BOTH = pytest.mark.parametrize("kind", ["redis", "directory"])


@asynccontextmanager
async def _opened(redis: PrivateRedis, directory: Path, **settings: Any) -> AsyncIterator[ScriptedCluster]:
    model = write_model(directory / NAME)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    async with in_own_task(open_cluster(redis, model, ONE_OF_EACH, **settings)) as cluster:
        yield cluster


@pytest.fixture
async def stored(redis_server: PrivateRedis, tmp_path: Path, state_url: str) -> AsyncIterator[ScriptedCluster]:
    """A router that stores responses."""
    async with _opened(redis_server, tmp_path, state_url=state_url) as cluster:
        yield cluster


def _reply(cluster: ScriptedCluster, *replies: str) -> None:
    cluster.script.replies = [[*tokens_of(reply), END] for reply in replies]


def _prompt(cluster: ScriptedCluster) -> str:
    return bytes(token for token in cluster.calls.decode_starts[-1].prompt_token_ids if token < 256).decode()


@BOTH
async def test_a_conversation_goes_on_by_the_id_of_a_response(stored: ScriptedCluster) -> None:
    _reply(stored, "<think>\nHm.\n</think>\n\nHello.")
    async with stored.client() as client:
        first = await client.responses.create(model=NAME, input="Hi", metadata={"a": "b"})
        assert first.store is True  # type: ignore[attr-defined]
        found = await client.responses.retrieve(first.id)
        assert found == first
        _reply(stored, "Bye.")
        second = await client.responses.create(model=NAME, input="Go on", previous_response_id=first.id)
        prompt = _prompt(stored)
        assert prompt.index("Hi") < prompt.index("Hello.Hm.") < prompt.index("Go on")
        assert second.previous_response_id == first.id
        items = await client.responses.input_items.list(second.id, order="asc", limit=2)
        assert [item.type for item in items.data] == ["message", "reasoning"]
        rest = await client.responses.input_items.list(second.id, order="asc", after=items.data[-1].id)
        assert [item.content[0].text for item in rest.data] == ["Hello.", "Go on"]  # type: ignore[union-attr]
        # Nothing of the chain is lost with its start.
        await client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(first.id)
        _reply(stored, "Yes.")
        await client.responses.create(model=NAME, input="More", previous_response_id=second.id)
        assert "Hello." in _prompt(stored)


async def test_what_is_not_stored_or_another_tenants_is_not_found(
    redis_server: PrivateRedis, tmp_path: Path, state_url: str
) -> None:
    keys = tmp_path / "keys.json"
    names = ("a", "b")
    keys.write_text(
        json.dumps({"keys": [{"id": n, "tenant": n, "sha256": hashlib.sha256(n.encode()).hexdigest()} for n in names]})
    )
    async with _opened(redis_server, tmp_path, state_url=state_url, api_keys_file=str(keys)) as cluster:
        _reply(cluster, "Hello.")
        a, b = (openai.AsyncOpenAI(base_url=f"{cluster.base_url}/v1", api_key=n, max_retries=0) for n in names)
        async with a, b:
            kept = await a.responses.create(model=NAME, input="Hi")
            loose = await a.responses.create(model=NAME, input="Hi", store=False)
            assert (await a.responses.retrieve(kept.id)).output_text == "Hello."
            for client, response in ((a, loose), (b, kept)):
                with pytest.raises(openai.NotFoundError):
                    await client.responses.retrieve(response.id)
                with pytest.raises(openai.NotFoundError, match="previous_response_id"):
                    await client.responses.create(model=NAME, input="x", previous_response_id=response.id)
                with pytest.raises(openai.NotFoundError):
                    await client.responses.delete(response.id)


async def test_a_background_response_is_polled(stored: ScriptedCluster) -> None:
    stored.script.pace = asyncio.Semaphore(0)
    _reply(stored, "Hello.")
    async with stored.client() as client:
        response = await client.responses.create(model=NAME, input="Hi", background=True)
        assert response.status == "queued"
        stored.script.pace.release()
        await eventually(lambda: _status(client, response.id, "in_progress"))
        for _ in range(20):
            stored.script.pace.release()
        await eventually(lambda: _status(client, response.id, "completed"))
        found = await client.responses.retrieve(response.id)
    assert found.output_text == "Hello."
    assert found.background is True
    assert found.usage is not None


async def _stop(runs: BackgroundRuns) -> None:
    """What a router's end does to what runs on it."""
    assert runs._group is not None
    runs._group.stop()

    async def nothing_runs() -> bool:
        return not runs._keys

    await eventually(nothing_runs)


async def _has_stage(cluster: ScriptedCluster, key: str, stage: Stage) -> bool:
    backend = cluster.router._responses
    assert backend is not None
    return await backend.stored.state.stage(key) is stage


async def _lose_claim(cluster: ScriptedCluster, key: str) -> None:
    """Ends a claim in Redis, as its time would."""
    state: Any = cluster.router._responses and cluster.router._responses.stored.state
    await state._store.call("DEL", state._keys(key)[2])


async def _status(client: openai.AsyncOpenAI, response_id: str, status: str) -> bool:
    return (await client.responses.retrieve(response_id)).status == status


async def test_a_background_stream_goes_on_behind_any_event(stored: ScriptedCluster) -> None:
    _reply(stored, "Hello.")
    async with stored.client() as client:
        stream = await client.responses.create(model=NAME, input="Hi", background=True, stream=True)
        events = [event async for event in stream]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert events[-1].type == "response.completed"
        for after in (0, 3, len(events) - 2, len(events) - 1):
            again = await client.responses.retrieve(events[0].response.id, stream=True, starting_after=after)
            rest = [event async for event in again]
            assert rest == events[after + 1 :]


async def test_a_background_response_is_cancelled(stored: ScriptedCluster) -> None:
    stored.script.fail("decode_token", None, hang)
    _reply(stored, "Hello.")
    async with stored.client() as client:
        stream = await client.responses.create(model=NAME, input="Hi", background=True, stream=True)
        events = []
        async for event in stream:
            events.append(event)
            if event.type == "response.output_text.delta":
                cancelled = await client.responses.cancel(events[0].response.id)
                assert cancelled.status == "cancelled"
                # A second time it is as it was.
                assert (await client.responses.cancel(cancelled.id)).status == "cancelled"
        assert [event.type for event in events if event.type.startswith("response.incomplete")]
        assert events[-1].type == "response.incomplete"
        with pytest.raises(openai.BadRequestError, match="cancelled"):
            await client.responses.create(model=NAME, input="x", previous_response_id=cancelled.id)


@BOTH
async def test_a_router_goes_on_with_what_a_lost_one_has_left(
    redis_server: PrivateRedis, tmp_path: Path, state_url: str
) -> None:
    """The events have the same numbers and contents, so that those who follow see no seam."""
    settings = {"state_url": state_url}
    async with _opened(redis_server, tmp_path, **settings) as lost:
        lost.script.fail("decode_token", None, None, hang)
        _reply(lost, "Hello.")
        async with lost.client() as client:
            stream = await client.responses.create(model=NAME, input="Hi", background=True, stream=True)
            events = []
            async for event in stream:
                events.append(event)
                if len([each for each in events if each.type == "response.output_text.delta"]) == 2:
                    break
        response_id = events[0].response.id
        backend = lost.router._responses
        assert backend is not None
        await _stop(backend.runs)
    script = Script(replies=[[*tokens_of("Hello."), END]])
    async with _opened(redis_server, tmp_path, script=script, **settings) as other, other.client() as client:
        again = await client.responses.retrieve(response_id, stream=True, starting_after=events[-1].sequence_number)
        rest = [event async for event in again]
        found = await client.responses.retrieve(response_id)
    assert [event.sequence_number for event in [*events, *rest]] == list(range(len(events) + len(rest)))
    assert [event.type for event in rest].count("response.completed") == 1
    assert found.output_text == "Hello."
    ids = {event.item_id for event in [*events, *rest] if hasattr(event, "item_id")}
    assert ids == {found.output[0].id}


async def test_an_id_that_is_sent_twice_disturbs_no_response_that_runs(stored: ScriptedCluster) -> None:
    """Proxies repeat the ids of requests that they send again."""
    stored.script.fail("decode_token", hang)
    _reply(stored, "Hello.")
    body, headers = {"model": NAME, "input": "Hi", "background": True}, {"X-Request-Id": "mine"}
    assert (await stored.post("/v1/responses", body, headers=headers))[0] == 200
    async with stored.client() as client:
        await eventually(lambda: _status(client, "resp_mine", "in_progress"))
    status, answer = await stored.post("/v1/responses", body, headers=headers)
    assert (status, answer["error"]["param"]) == (400, "X-Request-Id")
    assert (await stored.get("/v1/responses/resp_mine"))[1]["status"] == "in_progress"
    assert (await stored.post("/v1/responses/resp_mine/cancel"))[1]["status"] == "cancelled"


async def test_a_response_whose_routers_were_lost_three_times_fails(stored: ScriptedCluster) -> None:
    """It may be the cause. Those who wait for it have one last event."""
    stored.script.fail("decode_token", hang)
    _reply(stored, "Hello.")
    _, response = await stored.post("/v1/responses", {"model": NAME, "input": "Hi", "background": True})
    backend = stored.router._responses
    assert backend is not None
    [run] = backend.runs._runs.values()
    lost = replace(run.record, attempts=MAX_ATTEMPTS)
    await _stop(backend.runs)
    async with claiming(backend.stored.state, run.key) as claimed:
        assert await claimed.take()
        assert await backend.stored.update(lost, claimed)
    async with service_group() as group:
        group.start(backend.runs.run(), name="responses")
        await eventually(lambda: _has_stage(stored, run.key, Stage.ENDED))
    async with stored.client() as client:
        found = await client.responses.retrieve(response["id"])
        events = [event async for event in await client.responses.retrieve(response["id"], stream=True)]
    assert found.status == "failed"
    assert found.error is not None
    assert "3 routers" in found.error.message
    assert [event.type for event in events] == ["response.failed"]


async def test_a_router_adopts_a_response_once_however_many_follow_it(stored: ScriptedCluster) -> None:
    stored.script.fail("decode_token", hang)
    _reply(stored, "Hello.")
    await stored.post("/v1/responses", {"model": NAME, "input": "Hi", "background": True})
    backend = stored.router._responses
    assert backend is not None
    [run] = backend.runs._runs.values()
    lost = replace(run.record, response=replace(run.record.response, id="resp_lost"))
    key = record_key(lost.tenant, "resp_lost")
    await backend.stored.create(lost, holder="lost")
    await backend.stored.state.release(key, "lost")
    num_before = len(stored.calls.decode_starts)
    await asyncio.gather(*(backend.runs.adopt(key) for _ in range(4)))
    async with stored.client() as client:
        await eventually(lambda: _status(client, "resp_lost", "completed"))
    assert len(stored.calls.decode_starts) == num_before + 1
    assert (await stored.post(f"/v1/responses/{run.record.id}/cancel"))[0] == 200


async def test_a_router_gives_up_what_another_one_has_claimed(
    stored: ScriptedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claim, "_RENEWAL_S", 0.01)
    stored.script.fail("decode_token", hang)
    _reply(stored, "Hello.")
    _, response = await stored.post("/v1/responses", {"model": NAME, "input": "Hi", "background": True})
    backend = stored.router._responses
    assert backend is not None
    [run] = backend.runs._runs.values()
    # The release may come between two renewals, which then claim it again.
    while not await backend.stored.state.claim(run.key, "other"):
        await _lose_claim(stored, run.key)

    async def is_given_up() -> bool:
        return run.key not in backend.runs._runs

    await eventually(is_given_up)
    assert (await stored.get(f"/v1/responses/{response['id']}"))[1]["status"] == "queued"
    assert await backend.stored.state.claim(run.key, "other")


async def test_a_request_that_is_refused_is_not_stored(stored: ScriptedCluster) -> None:
    stored.router.models.first.requests.drain()
    body = {"model": NAME, "input": "Hi", "background": True}
    status, answer = await stored.post("/v1/responses", body)
    assert status == 503
    assert "shutting down" in answer["error"]["message"]
    backend = stored.router._responses
    assert backend is not None
    assert await backend.stored.state.unclaimed() == []


async def test_while_the_store_is_away_these_endpoints_alone_are_refused(
    redis_server: PrivateRedis, tmp_path: Path
) -> None:
    async with _opened(redis_server, tmp_path, state_url="redis://127.0.0.1:1/0") as cluster:
        _reply(cluster, "Hello.")
        for fields in ({}, {"store": True}, {"previous_response_id": "resp_1"}, {"background": True}):
            status, answer = await cluster.post("/v1/responses", {"model": NAME, "input": "Hi"} | fields)
            assert (status, answer["error"]["type"]) == (503, "store_error")
        assert (await cluster.get("/v1/responses/resp_1"))[0] == 503
        assert (await cluster.post("/v1/responses", {"model": NAME, "input": "Hi", "store": False}))[0] == 200
        body = {"model": NAME, "messages": [{"role": "user", "content": "Hi"}]}
        assert (await cluster.post("/v1/chat/completions", body))[0] == 200


async def test_wrong_requests_by_id(stored: ScriptedCluster) -> None:
    _reply(stored, "Hello.")
    _, response = await stored.post("/v1/responses", {"model": NAME, "input": "Hi"})
    path = f"/v1/responses/{response['id']}"
    for wrong, status in (
        (f"{path}?stream=true", 400),
        (f"{path}/input_items?limit=0", 400),
        (f"{path}/input_items?order=up", 400),
        (f"{path}/input_items?after=x", 400),
        ("/v1/responses/resp_unknown", 404),
        ("/v1/responses/un%20known", 400),
    ):
        assert (await stored.get(wrong))[0] == status, wrong
    assert (await stored.post(f"{path}/cancel"))[0] == 400
