"""Background responses when something goes wrong: every claim is given back, and every reader has one last event."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from pdserve.base.errors import Overloaded, StoreError, TooLarge
from pdserve.cli.private_redis import PrivateRedis
from router_svc.api.responses import api as responses_api
from router_svc.api.responses import background, follower, items
from router_svc.api.responses.backend import ResponsesBackend
from router_svc.api.responses.formatter import ResponsesFormatter
from router_svc.state import state_store
from router_svc.state.claim import Claim, claiming
from router_svc.state.response_record import ResponseRecord, ShownResponse, record_key
from router_svc.state.state_store import EventBatch, Stage
from tests.integration.router_svc.api.conftest import TEMPLATE
from tests.integration.router_svc.conftest import ScriptedCluster, open_cluster
from tests.integration.router_svc.request.support import ONE_OF_EACH
from tests.integration.router_svc.script import Context, hang
from tests.support.own_task import in_own_task
from tests.support.redis import eventually
from tests.support.tiny_model import END, NAME, tokens_of, write_model

DIRECTORY = pytest.mark.parametrize("kind", ["directory"])
BODY: dict[str, Any] = {"model": NAME, "input": "Hi", "background": True}


@asynccontextmanager
async def _opened(redis: PrivateRedis, directory: Path, **settings: Any) -> AsyncIterator[ScriptedCluster]:
    model = write_model(directory / NAME)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    async with in_own_task(open_cluster(redis, model, ONE_OF_EACH, **settings)) as cluster:
        cluster.script.replies = [[*tokens_of("Hello."), END]]
        yield cluster


@pytest.fixture
async def stored(
    redis_server: PrivateRedis, tmp_path: Path, state_url: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[ScriptedCluster]:
    """A router that stores responses, and looks for work as often as a test would have to wait for it."""
    monkeypatch.setattr(background, "_SWEEP_S", 0.02)
    monkeypatch.setattr(follower, "_WAIT_S", 0.02)
    monkeypatch.setattr(follower, "_RETRY_S", 0.02)
    async with _opened(redis_server, tmp_path, state_url=state_url) as cluster:
        yield cluster


def _backend(cluster: ScriptedCluster) -> ResponsesBackend:
    backend = cluster.router._responses
    assert backend is not None
    return backend


async def _started(cluster: ScriptedCluster) -> str:
    """The key of a response that runs."""
    _, response = await cluster.post("/v1/responses", BODY)
    return record_key("", response["id"])


async def _until_stage(cluster: ScriptedCluster, key: str, stage: Stage) -> None:
    async def is_there() -> bool:
        return await _backend(cluster).stored.state.stage(key) is stage

    await eventually(is_there)


async def _until_idle(cluster: ScriptedCluster) -> None:
    async def is_idle() -> bool:
        return not _backend(cluster).runs._keys

    await eventually(is_idle)


@asynccontextmanager
async def _foreign(cluster: ScriptedCluster, **changes: Any) -> AsyncIterator[tuple[ResponseRecord, Claim]]:
    """A response that another router runs."""
    body = json.dumps({"id": "resp_other", "status": "in_progress", "output": []}).encode()
    record = ResponseRecord(
        tenant="",
        key_id="",
        response=ShownResponse(id="resp_other", status="in_progress", body=body),
        items=[],
        first_own_item=0,
        timeout_s=60.0,
        arrived_at=time.time(),
        request="AA==",
    )
    record = replace(record, **changes)
    stored = _backend(cluster).stored
    async with claiming(stored.state, record_key("", record.id)) as claim:
        await stored.create(record, holder=claim.holder)
        yield record, claim


def _event(number: int, kind: str = "output_text.delta") -> bytes:
    data = json.dumps({"type": f"response.{kind}", "sequence_number": number})
    return f"event: response.{kind}\ndata: {data}".encode()


async def _numbers(response: aiohttp.ClientResponse) -> list[int]:
    lines = (await response.read()).splitlines()
    return [json.loads(line[6:])["sequence_number"] for line in lines if line.startswith(b"data: ")]


def _failing(function: Callable[..., Any], errors: list[Exception]) -> Callable[..., Any]:
    """The function, which raises these errors first."""

    async def failing(*arguments: Any, **named: Any) -> Any:
        if errors:
            raise errors.pop()
        return await function(*arguments, **named)

    return failing


@DIRECTORY
async def test_a_response_that_breaks_is_made_again(stored: ScriptedCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The claim of a directory does not expire."""
    closing = _failing(ResponsesFormatter.closing, [RuntimeError("it broke")])
    monkeypatch.setattr(ResponsesFormatter, "closing", closing)
    key = await _started(stored)
    await _until_stage(stored, key, Stage.ENDED)
    record = await _backend(stored).stored.read(key)
    assert record is not None
    assert (record.response.status, record.attempts) == ("completed", 2)
    assert record.response.output[0]["content"][0]["text"] == "Hello."


@DIRECTORY
async def test_a_response_whose_client_leaves_before_it_is_refused_is_gone(
    stored: ScriptedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests, state = stored.router.models.first.requests, _backend(stored).stored.state
    is_entered, goes_on = asyncio.Event(), asyncio.Event()

    async def refused(*_: object) -> None:
        is_entered.set()
        await goes_on.wait()
        raise Overloaded("The queue is full.", retry_after_s=1.0)

    monkeypatch.setattr(requests, "_entrants", refused)
    sending = asyncio.create_task(stored.post("/v1/responses", BODY, headers={"X-Request-Id": "mine"}))
    await is_entered.wait()
    key = record_key("", "resp_mine")
    assert await state.stage(key) is Stage.CLAIMED
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    goes_on.set()
    await _until_idle(stored)
    assert await state.stage(key) is Stage.GONE


@pytest.mark.parametrize("kind", ["redis", "directory"])
async def test_what_this_router_cannot_make_is_left_to_others_and_claimed_once(
    stored: ScriptedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, runs = _backend(stored).stored.state, _backend(stored).runs
    claimed: list[str] = []
    claim = state.claim

    async def counted(key: str, holder: str) -> bool:
        is_taken = await claim(key, holder)
        claimed.extend([key] * is_taken)
        return is_taken

    monkeypatch.setattr(state, "claim", counted)
    await state.create("0:unreadable", b"of another secret", holder="lost")
    async with _foreign(stored) as (record, _):
        unmakeable = record_key("", record.id)
    await state.release("0:unreadable", "lost")
    for _ in range(3):
        await runs.adopt("0:unreadable")
        await runs.adopt(unmakeable)
    # What can be made is not held up by them.
    async with _foreign(stored, response=replace(record.response, id="resp_late"), arrived_at=0.0) as (late, _):
        pass
    await _until_stage(stored, record_key("", late.id), Stage.ENDED)
    assert {each: claimed.count(each) for each in ("0:unreadable", unmakeable)} == {"0:unreadable": 1, unmakeable: 1}
    assert await state.stage("0:unreadable") is Stage.LEFT
    assert await state.stage(unmakeable) is Stage.LEFT


async def test_a_response_that_no_router_can_make_fails_at_its_deadline(stored: ScriptedCluster) -> None:
    async with _foreign(stored, arrived_at=time.time() - 100.0) as (record, _):
        key = record_key("", record.id)
    await _until_stage(stored, key, Stage.ENDED)
    _, response = await stored.get(f"/v1/responses/{record.id}")
    assert (response["status"], response["error"]["code"]) == ("failed", "server_error")
    assert "after 60 s" in response["error"]["message"]
    # It has one last event, behind whatever a reader has.
    async with stored.http.get(f"{stored.base_url}/v1/responses/{record.id}?stream=true&starting_after=7") as reader:
        assert await _numbers(reader) == [8]


async def test_a_reader_waits_until_the_store_is_back(stored: ScriptedCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in the middle of a stream would be a second head of HTTP within its body."""
    backend = _backend(stored)
    async with _foreign(stored) as (record, claim):
        await backend.stored.state.append(claim.key, EventBatch(first=0, events=[_event(0)]))
        url = f"{stored.base_url}/v1/responses/{record.id}?stream=true"
        async with stored.http.get(url) as response:
            assert b"event" in await response.content.readuntil(b"\n\n")
            errors: list[Exception] = [StoreError("it is away")] * 3
            monkeypatch.setattr(backend.stored.state, "stage", _failing(backend.stored.state.stage, errors))

            async def is_back() -> bool:
                return not errors

            await eventually(is_back)
            ended = replace(record, response=replace(record.response, status="completed"), num_events=2)
            assert await backend.stored.update(ended, claim)
            assert await _numbers(response) == [1]


async def test_a_stream_breaks_off_when_the_store_stays_away(
    stored: ScriptedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = _backend(stored)
    async with _foreign(stored, timeout_s=0.0) as (record, claim):
        await backend.stored.state.append(claim.key, EventBatch(first=0, events=[_event(0)]))
        async with stored.http.get(f"{stored.base_url}/v1/responses/{record.id}?stream=true") as response:
            body = await response.content.readuntil(b"\n\n")
            errors: list[Exception] = [StoreError("it is away")] * 1000
            monkeypatch.setattr(backend.stored.state, "stage", _failing(backend.stored.state.stage, errors))
            with pytest.raises(aiohttp.ClientPayloadError):
                while piece := await response.content.readany():
                    body += piece
        assert b"HTTP/1.1" not in body


async def test_a_reader_on_another_router_does_not_read_the_record_again_and_again(
    stored: ScriptedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = _backend(stored).stored.state
    num_reads, num_looks = 0, 0
    read, stage = state.read, state.stage

    async def counted_read(key: str) -> bytes | None:
        nonlocal num_reads
        num_reads += 1
        return await read(key)

    async def counted_stage(key: str) -> Stage:
        nonlocal num_looks
        num_looks += 1
        return await stage(key)

    monkeypatch.setattr(state, "read", counted_read)
    monkeypatch.setattr(state, "stage", counted_stage)
    async with _foreign(stored) as (record, claim):
        async with stored.http.get(f"{stored.base_url}/v1/responses/{record.id}?stream=true") as response:

            async def has_looked_often() -> bool:
                return num_looks >= 5

            await eventually(has_looked_often)
            await state.append(claim.key, EventBatch(first=0, events=[_event(0), _event(1, "completed")]))
            assert await _numbers(response) == [0, 1]
        assert num_reads == 1


@pytest.mark.parametrize("kind", ["redis", "directory"])
async def test_a_response_that_was_deleted_at_its_end_shows_no_end(stored: ScriptedCluster) -> None:
    """A client that has the last event finds the response."""
    stored.script.pace = asyncio.Semaphore(0)
    key = await _started(stored)
    backend = _backend(stored)
    run = backend.runs._runs[key]
    await backend.stored.state.delete(key)
    for _ in range(20):
        stored.script.pace.release()
    await _until_idle(stored)
    assert not run.feed.is_complete
    assert await backend.stored.state.events(key, -1, wait_s=0.01) == []
    assert await backend.stored.state.stage(key) is Stage.GONE


async def test_who_ends_a_response_that_no_router_runs_takes_no_claim_of_this_router(stored: ScriptedCluster) -> None:
    stored.script.fail("decode_token", hang)
    key = await _started(stored)
    backend = _backend(stored)
    await backend.runs.end_cancelled(key)
    assert await backend.stored.state.stage(key) is Stage.CLAIMED
    assert (await stored.post(f"/v1/responses/{key.partition(':')[2]}/cancel"))[1]["status"] == "cancelled"


async def test_a_response_that_is_too_large_for_the_store_fails(
    stored: ScriptedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is no outage, which would be waited out."""
    with monkeypatch.context() as patch:
        patch.setattr(state_store, "MAX_RECORD_BYTES", 100)
        status, answer = await stored.post("/v1/responses", BODY)
        assert (status, "may be stored" in answer["error"]["message"]) == (413, True)
        assert await _backend(stored).stored.state.unclaimed() == []
    stored.script.pace = asyncio.Semaphore(0)
    key = await _started(stored)
    path = f"/v1/responses/{key.partition(':')[2]}"
    stored.script.pace.release()

    async def is_in_progress() -> bool:
        return bool((await stored.get(path))[1]["status"] == "in_progress")

    await eventually(is_in_progress)
    responses = _backend(stored).stored
    monkeypatch.setattr(responses, "update", _failing(responses.update, [TooLarge("It may be stored no more.")]))
    for _ in range(20):
        stored.script.pace.release()
    await _until_stage(stored, key, Stage.ENDED)
    _, response = await stored.get(path)
    assert (response["status"], response["output"]) == ("failed", [])
    assert "may be stored" in response["error"]["message"]
    async with stored.http.get(f"{stored.base_url}{path}?stream=true") as reader:
        numbers = await _numbers(reader)
    assert numbers == [*range(len(numbers))]


async def test_a_request_in_the_foreground_leaves_a_response_in_the_background_as_it_is(
    stored: ScriptedCluster,
) -> None:
    stored.script.fail("decode_token", hang)
    headers = {"X-Request-Id": "mine"}
    assert (await stored.post("/v1/responses", BODY, headers=headers))[0] == 200
    status, answer = await stored.post("/v1/responses", {"model": NAME, "input": "Hi"}, headers=headers)
    assert (status, answer["error"]["param"]) == (400, "X-Request-Id")
    # It is stored nowhere, and disturbs nothing.
    status, _ = await stored.post("/v1/responses", {"model": NAME, "input": "Hi", "store": False}, headers=headers)
    assert status == 200
    record = await _backend(stored).stored.find("", "resp_mine")
    assert not await _backend(stored).stored.keep(
        json.dumps({"tenant": "", "key_id": "", "items": [], "first_own_item": 0}),
        replace(record.response, status="completed"),
    )
    assert (await stored.get("/v1/responses/resp_mine"))[1]["background"] is True
    assert (await stored.post("/v1/responses/resp_mine/cancel"))[1]["status"] == "cancelled"


async def test_a_conversation_that_is_too_long_to_go_on_is_refused(
    stored: ScriptedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, first = await stored.post("/v1/responses", {"model": NAME, "input": "Hi"})
    for module in (items, responses_api):
        monkeypatch.setattr(module, "MAX_MESSAGES", 2)
    body = {"model": NAME, "input": "Hi", "previous_response_id": first["id"]}
    status, answer = await stored.post("/v1/responses", body)
    assert (status, answer["error"]["param"]) == (400, "previous_response_id")
    assert "has 3 items" in answer["error"]["message"]


async def test_nothing_comes_behind_the_end_on_any_router(stored: ScriptedCluster) -> None:
    stored.script.pace = asyncio.Semaphore(0)
    key = await _started(stored)
    url = f"{stored.base_url}/v1/responses/{key.partition(':')[2]}?stream=true&starting_after="

    async def numbers(after: int) -> list[int]:
        async with stored.http.get(f"{url}{after}") as reader:
            return await _numbers(reader)

    reading = [asyncio.create_task(numbers(after)) for after in (-1, 1000)]
    for _ in range(20):
        stored.script.pace.release()
    found, beyond = await asyncio.gather(*reading)
    assert (found, beyond) == ([*range(len(found))], [])
    last = found[-1]
    await _until_idle(stored)
    for after, expected in ((last - 1, [last]), (last, []), (last + 1, []), (1000, [])):
        assert await numbers(after) == expected


async def test_a_response_that_is_adopted_is_charged_to_its_key(
    redis_server: PrivateRedis, tmp_path: Path, state_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "_SWEEP_S", 0.02)
    keys = tmp_path / "keys.json"
    entry = {"id": "a", "tenant": "a", "sha256": hashlib.sha256(b"a").hexdigest(), "tokens_per_minute": 100_000}
    keys.write_text(json.dumps({"keys": [entry]}))
    headers = {"Authorization": "Bearer a"}
    go_on = asyncio.Event()

    async def wait(_: Context) -> None:
        await go_on.wait()

    async with _opened(redis_server, tmp_path, state_url=state_url, api_keys_file=str(keys)) as cluster:
        cluster.script.fail("decode_token", wait, wait)
        _, response = await cluster.post("/v1/responses", BODY, headers=headers)
        backend = _backend(cluster)
        key = record_key("a", response["id"])
        lost = backend.runs._runs[key]
        other = replace(lost.record, response=replace(lost.record.response, id="resp_other"))
        gone = replace(lost.record, response=replace(lost.record.response, id="resp_gone"), key_id="removed")
        for record in (other, gone):
            async with claiming(backend.stored.state, record_key("a", record.id)) as claim:
                await backend.stored.create(record, holder=claim.holder)

        async def is_adopted() -> bool:
            return record_key("a", "resp_other") in backend.runs._runs

        await eventually(is_adopted)
        assert backend.runs._runs[record_key("a", "resp_other")].client == lost.client
        assert lost.client.limits is not None
        # The response of a key that was removed fails.
        await _until_stage(cluster, record_key("a", "resp_gone"), Stage.ENDED)
        failed = await backend.stored.find("a", "resp_gone")
        assert json.loads(failed.response.body)["error"]["code"] == "invalid_prompt"
        go_on.set()
        for record in (lost.record, other):
            await _until_stage(cluster, record_key("a", record.id), Stage.ENDED)


async def test_a_stream_that_is_resumed_stores_no_response_that_was_deleted(
    redis_server: PrivateRedis, tmp_path: Path, state_url: str
) -> None:
    settings = {"state_url": state_url, "resume_timeout_s": 60.0}
    async with _opened(redis_server, tmp_path, **settings) as cluster:
        body = {"model": NAME, "input": "Hi", "stream": True}
        for deletes in (False, True):
            async with cluster.http.post(f"{cluster.base_url}/v1/responses", json=body) as response:
                await response.read()
                path = f"/v1/responses/resp_{response.headers['X-Request-Id']}"
            assert (await cluster.get(path))[0] == 200
            if deletes:
                async with cluster.http.delete(cluster.base_url + path) as deleted:
                    assert deleted.status == 200
            url = f"{cluster.base_url}/v1/requests/{response.headers['X-Request-Id']}/stream"
            async with cluster.http.get(url) as again:
                events = await again.read()
            shown = json.loads(events.strip().splitlines()[-1].removeprefix(b"data: "))["response"]
            assert shown["store"] is not deletes
            assert (await cluster.get(path))[0] == (404 if deletes else 200)


async def test_items_have_ids_of_their_types(stored: ScriptedCluster) -> None:
    call = {"type": "function_call", "call_id": "1", "name": "put", "arguments": "{}"}
    sent = [
        {"role": "user", "content": "Hi"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        call,
        {"type": "function_call_output", "call_id": "1", "output": "done"},
        {"type": "custom_tool_call", "call_id": "2", "name": "run", "input": "ls"},
        {"type": "custom_tool_call_output", "call_id": "2", "output": "done"},
    ]
    _, response = await stored.post("/v1/responses", {"model": NAME, "input": sent})
    _, page = await stored.get(f"/v1/responses/{response['id']}/input_items?order=asc")
    prefixes = [item["id"].partition("_")[0] for item in page["data"]]
    assert prefixes == ["msg", "rs", "fc", "fco", "ctc", "ctco"]


async def test_a_request_refers_to_items_of_stored_responses(stored: ScriptedCluster) -> None:
    _, first = await stored.post("/v1/responses", {"model": NAME, "input": "Hi"})
    _, page = await stored.get(f"/v1/responses/{first['id']}/input_items")
    [sent_before], [said] = page["data"], first["output"]
    references = [{"type": "item_reference", "id": sent_before["id"]}, {"id": said["id"]}]
    sent = [*references, {"role": "user", "content": "Go on"}]
    status, second = await stored.post("/v1/responses", {"model": NAME, "input": sent})
    assert status == 200
    prompt = bytes(token for token in stored.calls.decode_starts[-1].prompt_token_ids if token < 256).decode()
    assert prompt.index("Hi") < prompt.index("Hello.") < prompt.index("Go on")
    # They are stored as items of their own, whatever becomes of the response that had them.
    _, page = await stored.get(f"/v1/responses/{second['id']}/input_items?order=asc")
    assert [item["content"][0]["text"] for item in page["data"]] == ["Hi", "Hello.", "Go on"]
    beyond = said["id"].removesuffix("0") + "7"
    for wrong, expected in (
        ([references[0], references[0]], 400),
        ([{"id": "msg_unknown"}], 404),
        ([{"id": beyond}], 404),
        ([{"id": f"msg_{number}-o0"} for number in range(17)], 400),
    ):
        status, answer = await stored.post("/v1/responses", {"model": NAME, "input": wrong})
        assert (status, answer["error"]["param"]) == (expected, "input"), wrong


async def test_a_conversation_that_is_too_long_loses_its_start_if_that_is_requested(stored: ScriptedCluster) -> None:
    sent = [{"role": "user", "content": f"{number} " + "x" * 100} for number in range(4)]
    body = {"model": NAME, "input": sent, "max_output_tokens": 8}
    assert (await stored.post("/v1/responses", body))[0] == 400
    status, response = await stored.post("/v1/responses", body | {"truncation": "auto"})
    assert (status, response["truncation"]) == (200, "auto")
    prompt = bytes(token for token in stored.calls.decode_starts[-1].prompt_token_ids if token < 256).decode()
    assert [f"{number} x" in prompt for number in range(4)] == [False, False, False, True]
    _, page = await stored.get(f"/v1/responses/{response['id']}/input_items")
    assert len(page["data"]) == 4
    too_long = body | {"input": "x" * 1000, "truncation": "auto"}
    status, answer = await stored.post("/v1/responses", too_long)
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
