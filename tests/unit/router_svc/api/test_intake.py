"""Bodies are read within a byte budget and a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from pdserve.base.errors import Overloaded
from router_svc.api.body import Body
from router_svc.api.http_app import HttpRules, make_app
from router_svc.api.http_request import read_body
from router_svc.api.intake import SMALL_BODY_BYTES, Intake
from router_svc.api.text_threads import TextThreads
from tests.support.deadline import DEADLINE_S

MAX_BODY = 8 * SMALL_BODY_BYTES


class _Text(Body):
    text: str


@asynccontextmanager
async def _server(intake: Intake) -> AsyncIterator[str]:
    async def handler(request: web.Request) -> web.Response:
        return web.json_response({"length": len((await read_body(request, _Text, intake)).text)})

    runner = web.AppRunner(make_app([[web.post("/", handler)]], HttpRules(max_body_bytes=MAX_BODY)))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    [address] = runner.addresses
    try:
        yield f"http://127.0.0.1:{address[1]}/"
    finally:
        await runner.cleanup()


@pytest.fixture
def threads() -> TextThreads:
    return TextThreads()


def test_large_bodies_leave_room_for_small_ones(threads: TextThreads) -> None:
    intake = Intake(threads, max_bytes=1_000_000)
    with intake.hold() as large, intake.hold() as small, intake.hold() as late:
        large.add(750_000)
        with pytest.raises(Overloaded, match=r"holds 750000 bytes .* .limit 750000"):
            late.add(SMALL_BODY_BYTES + 1)
        small.add(SMALL_BODY_BYTES)
        assert (intake.held_bytes, intake.refused) == (750_000 + SMALL_BODY_BYTES, 1)
    assert intake.held_bytes == 0


async def test_a_body_beyond_the_budget_is_refused_before_it_is_read(threads: TextThreads) -> None:
    """Finding 4. Fails without `require_room` for the announced size in `Intake._receive`."""
    # Nothing of the body is sent: only an answer that comes before it can arrive.
    intake = Intake(threads, max_bytes=100_000)
    head = b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: 200000\r\n\r\n"
    async with _server(intake) as url, asyncio.timeout(DEADLINE_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.strip("/").rpartition(":")[2]))
        writer.write(head)
        answer = (await reader.readuntil(b"}}")).decode()
        writer.close()
        await writer.wait_closed()
    assert answer.startswith("HTTP/1.1 429")
    assert "Retry-After: 5\r\n" in answer
    assert "limit 75000" in answer
    assert intake.held_bytes == 0


async def test_bytes_that_have_arrived_count_until_the_body_is_complete(threads: TextThreads) -> None:
    intake = Intake(threads)
    go_on = asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield b'{"text": "' + b"x" * 100_000
        await go_on.wait()
        yield b'"}'

    async with _server(intake) as url, aiohttp.ClientSession() as http, asyncio.timeout(DEADLINE_S):
        headers = {"Content-Type": "application/json"}
        post = asyncio.create_task(http.post(url, data=slow(), headers=headers))
        while intake.held_bytes < 100_000:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.001)
        go_on.set()
        async with await post as response:
            assert await response.json() == {"length": 100_000}
    assert intake.held_bytes == 0


async def test_a_body_that_does_not_arrive_in_time_is_refused(threads: TextThreads) -> None:
    """Finding 4. Fails without the timeout of `Intake._receive`."""
    never = asyncio.Event()

    async def stuck() -> AsyncIterator[bytes]:
        yield b'{"text": '
        await never.wait()

    headers = {"Content-Type": "application/json"}
    async with (
        _server(Intake(threads, timeout_s=0.05)) as url,
        aiohttp.ClientSession() as http,
        asyncio.timeout(DEADLINE_S),
        http.post(url, data=stuck(), headers=headers) as response,
    ):
        assert response.status == 400
        assert "did not arrive within 0.05 s" in await response.text()
