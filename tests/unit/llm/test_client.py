"""The client against a server with scripted answers: overload, lost connections, errors, many requests at a time."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from pdserve import PromptFailed, PromptRefused, RequestOutput, SamplingParams, ShutDown
from pdserve.base.errors import (
    DeadlineExceeded,
    Forbidden,
    NotFound,
    Overloaded,
    PdserveError,
    PeerLost,
    QuotaExceeded,
    SetupError,
    Unauthorized,
)
from pdserve.llm.batch import run_all
from pdserve.llm.client import Client, Request, Settings
from pdserve.llm.prompts import Prompt
from pdserve.llm.tokenizer import AsyncTokenizer

PARAMS = SamplingParams(temperature=0.5)
USAGE = {"prompt_tokens": 1, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}}
INFO: dict[str, Any] = {
    "vocab_size": 9,
    "bos_token": None,
    "eos_token": None,
    "eos_token_ids": [],
    "chat_template": None,
}
Answer = Callable[[dict[str, Any]], Awaitable[web.Response]]


def _whole(body: dict[str, Any]) -> web.Response:
    """The prompt comes back as the output."""
    choice = {
        "index": 0,
        "text": str(body["prompt"]),
        "token_ids": [1],
        "prompt_token_ids": [2],
        "finish_reason": "stop",
    }
    return web.json_response({"choices": [choice], "usage": USAGE})


def _refusal(status: int, *, code: object = None, param: str | None = None, **headers: str) -> web.Response:
    error = {"message": f"Status {status}.", "type": "t", "param": param, "code": code or status}
    return web.json_response({"error": error}, status=status, headers=headers)


class _Server:
    """Answers with what is scripted, then echoes."""

    def __init__(self) -> None:
        self.script: deque[web.Response | None] = deque()
        self.bodies: list[dict[str, Any]] = []
        self.request_ids: list[str] = []
        self.running = self.peak = 0
        #: Released by each request that arrives.
        self.arrivals = asyncio.Semaphore(0)
        #: Set to let requests end.
        self.gate = asyncio.Event()
        self.gate.set()
        #: Set by prompt 19, for which prompt 0 waits.
        self.has_last = asyncio.Event()
        self.models_answer: dict[str, object] = {}
        self.card: dict[str, Any] = {"id": "m", "max_model_len": 99, "default_sampling_params": {"top_p": 0.5}}

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response(self.models_answer or {"data": [self.card]})

    async def tokenize(self, request: web.Request) -> web.StreamResponse:
        self.arrivals.release()
        await self.gate.wait()
        scripted = self.script.popleft() if self.script else web.json_response({"tokens": [5, 6]})
        assert request.transport is not None
        if scripted is None:
            request.transport.abort()
            return web.Response()
        return scripted

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        self.bodies.append(body)
        self.request_ids.append(request.headers["X-Request-Id"])
        self.running += 1
        self.peak = max(self.peak, self.running)
        self.arrivals.release()
        try:
            await self.gate.wait()
            if body["prompt"] == "19":
                self.has_last.set()
            if body["prompt"] == "0":
                await self.has_last.wait()
            await asyncio.sleep(0)
            if self.script:
                scripted = self.script.popleft()
                if scripted is not None:
                    return scripted
                assert request.transport is not None
                request.transport.abort()
            return _whole(body)
        finally:
            self.running -= 1


@asynccontextmanager
async def _serving(**settings: Any) -> AsyncIterator[tuple[_Server, Client]]:
    server = _Server()
    app = web.Application()
    routes = [web.get("/v1/models", server.models), web.post("/v1/completions", server.complete)]
    app.add_routes([*routes, web.post("/tokenize", server.tokenize)])
    async with TestServer(app) as running:
        client = Client(Settings(model=None, base_url=str(running.make_url("/")), **settings))
        await client.open()
        try:
            yield server, client
        finally:
            await client.close()


def _requests(client: Client, *texts: str) -> list[Request]:
    return [client.request(Prompt(text=text), PARAMS) for text in texts]


async def _run(client: Client, *texts: str, limit: int = 10) -> list[RequestOutput]:
    return await run_all(client, _requests(client, *texts), limit, lambda _: None)


async def test_bodies_have_the_model_a_seed_and_an_id_of_their_own() -> None:
    async with _serving(seed=4) as (server, client):
        outputs = await _run(client, "a", "b")
        assert [output.outputs[0].text for output in outputs] == ["a", "b"]
        assert {body["model"] for body in server.bodies} == {"m"}
        assert {body["seed"] for body in server.bodies} == {output.seed for output in outputs}
        assert set(server.request_ids) == {output.request_id for output in outputs}
        assert len(set(server.request_ids)) == 2
        assert all(body["return_token_ids"] and "stream" not in body for body in server.bodies)


async def test_overload_is_waited_out_with_the_same_seed() -> None:
    async with _serving() as (server, client):
        server.script += [_refusal(429, **{"Retry-After": "0"}), _refusal(503, **{"Retry-After": "0"})]
        [output] = await _run(client, "a")
        assert output.outputs[0].text == "a"
        assert len({body["seed"] for body in server.bodies}) == 1
        assert len(server.bodies) == 3


async def test_overload_is_waited_for_no_longer_than_the_limit() -> None:
    async with _serving(overload_timeout_s=5.0) as (server, client):
        server.script += [_refusal(503, **{"Retry-After": "6"})]
        with pytest.raises(Overloaded, match="503"):
            await _run(client, "a")
        assert len(server.bodies) == 1


async def test_a_budget_that_is_used_up_is_not_waited_for() -> None:
    async with _serving() as (server, client):
        server.script += [_refusal(429, code="insufficient_quota", **{"Retry-After": "0"})]
        with pytest.raises(QuotaExceeded):
            await _run(client, "a")
        assert len(server.bodies) == 1


async def test_a_connection_that_breaks_before_any_output_is_tried_again() -> None:
    async with _serving() as (server, client):
        server.script += [None]
        [output] = await _run(client, "a")
        assert output.outputs[0].text == "a"
        assert len(server.bodies) == 2


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, PromptRefused),
        (401, Unauthorized),
        (403, Forbidden),
        (404, NotFound),
        (413, PromptRefused),
        (422, PromptRefused),
        (504, DeadlineExceeded),
        (500, PdserveError),
    ],
)
async def test_errors_have_a_class_and_the_servers_words(status: int, kind: type[PdserveError]) -> None:
    async with _serving() as (server, client):
        server.script += [_refusal(status, param="top_p")]
        with pytest.raises(PdserveError, match=f"Status {status}") as refused:
            await _run(client, "a")
        assert type(refused.value) is kind
        assert getattr(refused.value, "param", "top_p") in ("top_p", None)


async def test_what_a_progress_bar_raises_is_raised_as_it_is() -> None:
    def broken(_: RequestOutput) -> None:
        raise ZeroDivisionError("of the bar")

    async with _serving() as (_, client):
        with pytest.raises(ZeroDivisionError, match="of the bar"):
            await run_all(client, _requests(client, "a", "b", "c"), 2, broken)


async def test_an_answer_that_is_none_of_pdserves_is_said_to_be_that() -> None:
    async with _serving() as (server, client):
        server.script += [web.Response(status=502, text="<html>")]
        with pytest.raises(PdserveError, match="answered 502 Bad Gateway, and not as pdserve does"):
            await _run(client, "a")


async def test_at_most_so_many_requests_run_at_a_time_and_results_are_in_order() -> None:
    async with _serving() as (server, client):
        texts = [str(number) for number in range(20)]
        server.gate.clear()
        running = asyncio.create_task(_run(client, *texts, limit=3))
        for _ in range(3):
            await server.arrivals.acquire()
        server.gate.set()
        # Prompt 0 ends last.
        assert [output.outputs[0].text for output in await running] == texts
        assert server.peak == 3


async def test_a_failure_has_its_index_and_cancels_the_others() -> None:
    async with _serving() as (server, client):
        server.script += [_refusal(500)]
        with pytest.raises(PromptFailed, match=r"Prompt 0 of 3: .*Status 500") as failed:
            await _run(client, "a", "b", "c", limit=1)
        assert failed.value.index == 0
        assert isinstance(failed.value.__cause__, PdserveError)
        assert len(server.bodies) == 1


async def test_cancelling_ends_all_requests() -> None:
    async with _serving() as (server, client):
        server.gate.clear()
        running = asyncio.create_task(_run(client, *"abcdef", limit=4))
        for _ in range(4):
            await server.arrivals.acquire()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert len(server.bodies) == 4
        server.gate.set()


async def test_the_models_defaults_are_the_default_parameters() -> None:
    async with _serving() as (server, client):
        assert client.default_params() == SamplingParams(top_p=0.5)
        server.card["default_sampling_params"]["max_new_tokens"] = 7
        await client.open()
        assert client.default_params() == SamplingParams(top_p=0.5, max_tokens=7)


async def test_a_server_that_is_away_is_an_error_at_once() -> None:
    async with _serving() as (_, client):
        address = client.http.base_url
    with pytest.raises(PeerLost, match=f"Cannot reach {address}"):
        await Client(Settings(model=None, base_url=address)).open()


async def test_tokenizing_is_tried_again_as_generating_is() -> None:
    async with _serving() as (server, client):
        server.script += [None, _refusal(503, **{"Retry-After": "0"})]
        request = client.request(Prompt(text="a"), SamplingParams(max_tokens=None))
        [output] = await run_all(client, [request], 1, lambda _: None)
        assert output.prompt == "a"
        assert [(body["prompt"], body["max_tokens"]) for body in server.bodies] == [([5, 6], 97)]
        server.script += [_refusal(429, **{"Retry-After": "0"}), None]
        assert await AsyncTokenizer(client, INFO).encode("a") == [5, 6]
        server.script += [_refusal(400)]
        with pytest.raises(PromptRefused):
            await AsyncTokenizer(client, INFO).encode("a")


async def test_closing_ends_calls_that_run_and_later_ones() -> None:
    async with _serving() as (server, client):
        server.gate.clear()
        calls = [asyncio.create_task(client.post("/tokenize", {"prompt": "a"})) for _ in range(3)]
        for _ in calls:
            await server.arrivals.acquire()
        await client.close()
        for call in calls:
            with pytest.raises(ShutDown):
                await call
        with pytest.raises(ShutDown):
            await client.get("/v1/models")
        server.gate.set()


async def test_closing_ends_the_wait_for_a_server_that_is_overloaded() -> None:
    async with _serving() as (server, client):
        server.script += [_refusal(503, **{"Retry-After": "500"})]
        call = asyncio.create_task(client.post("/tokenize", {"prompt": "a"}))
        await server.arrivals.acquire()
        await client.close()
        with pytest.raises(ShutDown):
            await call


async def test_of_several_models_one_is_chosen() -> None:
    async with _serving() as (server, client):
        server.models_answer = {"data": [{"id": name, "max_model_len": 9} for name in "ab"]}
        with pytest.raises(SetupError, match=r"serves 'a', 'b'\. Choose one with `model`"):
            await client.open()
        client._settings = replace(client._settings, model="c")
        with pytest.raises(NotFound, match=r"serves 'a', 'b', not 'c'\. Choose one of them"):
            await client.open()
    async with _serving() as (server, client):
        server.models_answer = {"data": [{"id": name, "max_model_len": 9} for name in "ab"]}
        client._settings = replace(client._settings, model="b")
        await client.open()
        assert client.model == "b"


@pytest.mark.parametrize("data", [[], [{"id": "m"}], "m"])
async def test_a_list_of_models_that_is_none_of_pdserves_is_said_to_be_that(data: object) -> None:
    async with _serving() as (server, client):
        server.card = {"id": "m", "max_model_len": 9}
        server.models_answer = {"data": data}
        with pytest.raises(PdserveError, match="/v1/models does not answer as pdserve does"):
            await client.open()


async def test_what_is_wrong_with_a_prompt_or_a_progress_bar_is_raised_itself() -> None:
    """Fails if it comes wrapped in the group of an `asyncio.TaskGroup`."""
    async with _serving() as (server, client):
        params = SamplingParams(thinking_token_budget=4)
        request = client.request(Prompt(text="a"), params)
        with pytest.raises(ValueError, match="bounds the thinking of messages"):
            await run_all(client, [request], 1, lambda _: None)
        assert server.bodies == []

        def fail(_: RequestOutput) -> None:
            raise KeyError("bar")

        with pytest.raises(KeyError, match="bar"):
            await run_all(client, _requests(client, "a", "b"), 1, fail)
