"""Clients go on at another router: streams behind their last event, other requests from the start."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from pdserve.cli.chaos.client import Clients, open_http
from pdserve.cli.chaos.outcome import COMPLETE, FAILED, LEFT, Outcome
from pdserve.cli.chaos.workload import COMPLETIONS, ChaosRequest, Sending

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def sse(number: int, text: str, finish: str | None = None) -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": finish}
    return f"id: e{number}\ndata: {json.dumps({'id': 'cmpl-1', 'choices': [choice]})}\n\n".encode()


DONE = b"id: e9\ndata: [DONE]\n\n"


def sending(*, stream: bool) -> Sending:
    request = ChaosRequest(index=0, path=COMPLETIONS, body={"prompt": "a", "max_tokens": 16, "stream": stream})
    return Sending(number=7, request=request, cache_salt="salt", router=0)


def streaming(*pieces: bytes, cut: bool = False) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
        if cut:
            assert request.transport is not None
            request.transport.abort()
        return response

    return handle


@asynccontextmanager
async def routers(*handlers: Handler) -> AsyncIterator[tuple[list[str], list[web.Request]]]:
    """Servers that answer everything with their handler, and the requests that came."""
    seen: list[web.Request] = []
    urls = []
    runners = []
    for handler in handlers:

        async def handle(request: web.Request, handler: Handler = handler) -> web.StreamResponse:
            seen.append(request)
            await request.read()
            return await handler(request)

        application = web.Application()
        application.router.add_route("*", "/{path:.*}", handle)
        runner = web.AppRunner(application, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        runners.append(runner)
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        urls.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
    try:
        yield urls, seen
    finally:
        for runner in runners:
            await runner.cleanup()


async def ask(urls: list[str], what: Sending, choices: list[int], **options: Any) -> Outcome:
    """`choices`: the routers that are ready, one after the other."""
    order = iter([*choices, *([choices[-1]] * 1000)])
    async with open_http() as http:
        clients = Clients(
            http, model="m", urls=urls, choose=lambda _: next(order), prefix="c", **({"timeout_s": 30} | options)
        )
        return await clients.ask(what)


async def test_a_stream_whose_router_is_lost_goes_on_behind_its_last_event() -> None:
    first, second = streaming(sse(1, "a"), sse(2, "b"), cut=True), streaming(sse(3, "c", "stop"), DONE)
    async with routers(first, second) as (urls, seen):
        outcome = await ask(urls, sending(stream=True), [0, 1])
    assert (outcome.status, outcome.error) == (COMPLETE, None)
    assert outcome.answer.choices[0].text == "abc"
    assert (outcome.num_resumed, outcome.num_repeated) == (1, 0)
    assert seen[0].headers["X-Request-Id"] == outcome.request_id
    assert (seen[1].method, seen[1].path) == ("GET", f"/v1/requests/{outcome.request_id}/stream")
    assert seen[1].headers["Last-Event-ID"] == "e2"
    assert len(outcome.token_times) == 3


async def test_a_response_that_is_not_streamed_is_sent_again() -> None:
    async def whole(_: web.Request) -> web.StreamResponse:
        choice = {"index": 0, "text": "abc", "finish_reason": "stop", "stop_reason": None}
        return web.json_response({"id": "cmpl-1", "choices": [choice]})

    async def lost(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async with routers(lost, whole) as (urls, seen):
        outcome = await ask(urls, sending(stream=False), [0, 1])
    assert (outcome.status, outcome.answer.choices[0].text) == (COMPLETE, "abc")
    assert (outcome.num_resumed, outcome.num_repeated) == (0, 1)
    assert [request.method for request in seen] == ["POST", "POST"]


async def test_a_router_that_does_not_know_the_stream_yet_is_tried_again() -> None:
    answers = iter([web.Response(status=404), None])

    async def second(request: web.Request) -> web.StreamResponse:
        return next(answers) or await streaming(sse(2, "b", "stop"), DONE)(request)

    async with routers(streaming(sse(1, "a"), cut=True), second) as (urls, _):
        outcome = await ask(urls, sending(stream=True), [0, 1])
    assert (outcome.status, outcome.answer.choices[0].text) == (COMPLETE, "ab")


def without_ids(*pieces: bytes) -> list[bytes]:
    return [re.sub(rb"^id: .*\n", b"", piece) for piece in pieces]


async def test_a_stream_without_an_id_is_sent_again_where_no_router_knows_it() -> None:
    async def second(request: web.Request) -> web.StreamResponse:
        if request.method == "GET":
            return web.Response(status=404)
        return await streaming(sse(1, "a"), sse(2, "b", "stop"), DONE)(request)

    async with routers(streaming(*without_ids(sse(1, "a")), cut=True), second) as (urls, seen):
        outcome = await ask(urls, sending(stream=True), [0, 1])
    assert (outcome.status, outcome.answer.choices[0].text) == (COMPLETE, "ab")
    assert (outcome.num_resumed, outcome.num_repeated) == (0, 1)
    assert [request.method for request in seen] == ["POST", "GET", "POST"]


async def test_a_stream_without_an_id_comes_again_from_its_start() -> None:
    first = streaming(*without_ids(sse(1, "a")), cut=True)
    second = streaming(sse(1, "a"), sse(2, "b", "stop"), DONE)
    async with routers(first, second) as (urls, seen):
        outcome = await ask(urls, sending(stream=True), [0, 1])
    assert (outcome.status, outcome.answer.choices[0].text) == (COMPLETE, "ab")
    assert "Last-Event-ID" not in seen[1].headers


async def test_refusals_errors_and_early_ends_are_failures() -> None:
    async def refused(_: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": "no worker"}}, status=503)

    error = b'data: {"error": {"type": "worker_lost_error"}}\n\n'
    for handler, reason in (
        (refused, "HTTP 503: no worker"),
        (streaming(sse(1, "a"), error, DONE), "worker_lost_error"),
        (streaming(sse(1, "a")), "ended before the answer"),
    ):
        async with routers(handler) as (urls, _):
            outcome = await ask(urls, sending(stream=True), [0])
        assert outcome.status == FAILED
        assert reason in (outcome.error or "")


async def test_a_request_without_an_end_is_a_failure() -> None:
    forever = asyncio.Event()

    async def silent(_: web.Request) -> web.StreamResponse:
        await forever.wait()
        return web.Response()

    async with routers(silent) as (urls, _):
        outcome = await ask(urls, sending(stream=True), [0], timeout_s=0.05)
        forever.set()
    assert (outcome.status, outcome.error) == (FAILED, "not answered within 0.05 s")


async def test_a_stream_has_no_router_from_the_kill_to_the_answer_of_another_one() -> None:
    """Neither while its client reads nothing and notices nothing, nor while it looks for another one."""
    reads_on, answers = asyncio.Event(), asyncio.Event()

    async def first(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(sse(1, "a"))
        await reads_on.wait()
        assert request.transport is not None
        request.transport.abort()
        return response

    async def second(request: web.Request) -> web.StreamResponse:
        resuming.set()
        await answers.wait()
        return await streaming(sse(2, "b", "stop"), DONE)(request)

    resuming = asyncio.Event()
    order = iter([0, 1])
    async with routers(first, second) as (urls, _), open_http() as http:
        clients = Clients(http, model="m", urls=urls, choose=lambda _: next(order), prefix="c", timeout_s=30)
        asking = asyncio.create_task(clients.ask(sending(stream=True)))
        while not clients.running or not clients.running[0].outcome.token_times:  # noqa: ASYNC110 (there is no event)
            await asyncio.sleep(0)
        [reader] = clients.running
        before, now = time.monotonic() - 60, time.monotonic()
        assert [reader.has_router(killed) for killed in ({}, {0: before}, {1: now}, {0: now})] == [True] * 3 + [False]
        reads_on.set()
        await resuming.wait()
        assert not reader.has_router({})
        answers.set()
        assert (await asking).status == COMPLETE
        assert reader.has_router({0: now})


async def test_a_client_that_leaves_keeps_what_it_got() -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(sse(1, "a"))
        await asyncio.Event().wait()
        return response

    async with routers(handle) as (urls, _), open_http() as http:
        clients = Clients(http, model="m", urls=urls, choose=lambda _: 0, prefix="c", timeout_s=30)
        asking = asyncio.create_task(clients.ask(sending(stream=True)))
        while not clients.running or not clients.running[0].outcome.token_times:  # noqa: ASYNC110 (there is no event)
            await asyncio.sleep(0)
        clients.running[0].leave()
        outcome = await asking
    assert (outcome.status, outcome.answer.choices[0].text) == (LEFT, "a")
    assert clients.running == []
