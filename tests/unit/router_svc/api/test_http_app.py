"""What the HTTP listeners refuse before a handler sees the request, and how long they wait for readers."""

from __future__ import annotations

import asyncio
import gzip
import tracemalloc
import zlib
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from pdserve.net.admin import bound_socket, serve_http
from pdserve.net.hosts import AllowedHosts
from router_svc.api.body import Body
from router_svc.api.http_app import HttpRules, make_app
from router_svc.api.http_request import read_body
from router_svc.api.intake import Intake
from router_svc.api.text_threads import TextThreads
from tests.support.redis import eventually


class _Fields(Body):
    x: int


#: Requests that were posted, the last one last.
_POSTED: deque[web.Request] = deque(maxlen=1)


async def _post(request: web.Request) -> web.Response:
    _POSTED.append(request)
    return web.json_response({"x": (await read_body(request, _Fields, Intake(TextThreads()))).x})


_SEEN: asyncio.Queue[web.Request] = asyncio.Queue()


async def _large(request: web.Request) -> web.Response:
    _SEEN.put_nowait(request)
    return web.Response(body=bytes(64 << 20))


async def _broken(_: web.Request) -> web.Response:
    raise ValueError("swordfish at 0x7f00")


@asynccontextmanager
async def _serving(**rules: object) -> AsyncIterator[str]:
    routes = [web.post("/post", _post), web.get("/large", _large), web.get("/broken", _broken)]
    app = make_app([routes], HttpRules(**({"max_body_bytes": 1024} | rules)))  # type: ignore[arg-type]
    listener = bound_socket("127.0.0.1", 0, flag="--port")
    async with serve_http(app, listener) as address:
        yield address
    listener.close()


@pytest.mark.parametrize(
    "content_type", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"]
)
async def test_a_body_that_any_web_page_may_send_is_refused(content_type: str | None) -> None:
    headers = {} if content_type is None else {"Content-Type": content_type}
    skip = ["Content-Type"] if content_type is None else []
    async with (
        _serving() as address,
        aiohttp.ClientSession(skip_auto_headers=skip) as http,
        http.post(f"http://{address}/post", data=b'{"x": 1}', headers=headers) as response,
    ):
        assert response.status == 415
        assert "Content-Type: application/json" in (await response.json())["error"]["message"]


async def test_json_with_a_charset_is_taken() -> None:
    headers = {"Content-Type": "Application/JSON; charset=utf-8"}
    async with (
        _serving() as address,
        aiohttp.ClientSession() as http,
        http.post(f"http://{address}/post", data=b'{"x": 1}', headers=headers) as response,
    ):
        assert (response.status, await response.json()) == (200, {"x": 1})


async def test_an_unexpected_error_shows_nothing_of_the_process() -> None:
    async with (
        _serving() as address,
        aiohttp.ClientSession() as http,
        http.get(f"http://{address}/broken") as response,
    ):
        assert response.status == 500
        text = await response.text()
    assert "failed unexpectedly" in text
    assert not any(word in text for word in ("swordfish", "0x", "Traceback", "ValueError", ".py"))


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_a_compressed_body_counts_as_what_it_unpacks_to(encoding: str) -> None:
    """Fails when only `Content-Length` is compared with the limit: 64 KiB here are 64 MiB."""
    packer = zlib.compressobj(wbits=31 if encoding == "gzip" else 15)
    data = packer.compress(b" " * (64 << 20)) + packer.flush()
    headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
    async with _serving(max_body_bytes=1 << 20) as address, aiohttp.ClientSession() as http:
        tracemalloc.start()
        try:
            async with http.post(f"http://{address}/post", data=data, headers=headers) as response:
                assert response.status == 413
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert peak < 8 << 20


async def test_the_rest_of_a_compressed_body_that_is_refused_is_not_unpacked() -> None:
    """Fails when aiohttp unpacks: until the end of the body, it goes on after the answer."""
    data = zlib.compress(b" " * (64 << 20))
    headers = {"Content-Type": "application/json", "Content-Encoding": "deflate"}
    async with _serving(max_body_bytes=1 << 20) as address, aiohttp.ClientSession() as http:
        async with http.post(f"http://{address}/post", data=data, headers=headers) as response:
            assert response.status == 413
        content = _POSTED[-1].content
        await content.wait_eof()
    assert content.total_bytes <= len(data)


@pytest.mark.parametrize("encoding", ["br", "zstd", "compress", "gzip, gzip"])
async def test_an_encoding_that_is_not_known_is_refused(encoding: str) -> None:
    """Whatever packages for it are installed."""
    headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
    async with (
        _serving() as address,
        aiohttp.ClientSession() as http,
        http.post(f"http://{address}/post", data=b'{"x": 1}', headers=headers) as response,
    ):
        assert response.status == 415
        assert "Send gzip, deflate, or a plain body." in (await response.json())["error"]["message"]


_BODY = b'{"x": 1}' + b" " * 900


@pytest.mark.parametrize(
    ("encoding", "data"),
    [
        ("identity", _BODY),
        ("gzip", gzip.compress(_BODY, mtime=0)),
        ("X-GZIP", gzip.compress(_BODY, mtime=0)),
        ("deflate", zlib.compress(_BODY)),
        ("deflate", zlib.compress(_BODY, wbits=-15)),
    ],
)
async def test_a_compressed_body_is_read_however_it_is_cut(encoding: str, data: bytes) -> None:
    async def cut() -> AsyncIterator[bytes]:
        for index in range(len(data)):
            yield data[index : index + 1]

    headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
    async with (
        _serving() as address,
        aiohttp.ClientSession() as http,
        http.post(f"http://{address}/post", data=cut(), headers=headers) as response,
    ):
        assert (response.status, await response.json()) == (200, {"x": 1})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (gzip.compress(_BODY, mtime=0)[:-9], "ends too early"),
        (gzip.compress(_BODY, mtime=0) * 2, "goes on behind the end"),
        (b"\x1f\x8b\x08" + b"?" * 40, "cannot be unpacked"),
        (_BODY, "cannot be unpacked"),
    ],
)
async def test_a_damaged_compressed_body_is_refused(data: bytes, message: str) -> None:
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    async with (
        _serving() as address,
        aiohttp.ClientSession() as http,
        http.post(f"http://{address}/post", data=data, headers=headers) as response,
    ):
        assert response.status == 400
        assert message in (await response.json())["error"]["message"]


async def test_compressed_bytes_that_unpack_to_nothing_count() -> None:
    """Empty blocks: as many as one likes, without a byte of a body."""
    packer = zlib.compressobj()
    data = b"".join(packer.flush(zlib.Z_FULL_FLUSH) for _ in range(1000))

    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield data

    headers = {"Content-Type": "application/json", "Content-Encoding": "deflate"}
    async with (
        _serving() as address,
        aiohttp.ClientSession() as http,
        http.post(f"http://{address}/post", data=endless(), headers=headers) as response,
    ):
        assert response.status == 413


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": "Bearer " + "e" * 9000},
        {"Cookie": "session=" + "c" * 12_000},
        {f"X-Group-{index}": "g" * 4000 for index in range(15)},
    ],
    ids=["a token with many groups", "a session", "60 KB in all"],
)
async def test_headers_as_proxies_pass_them_on_are_taken(headers: dict[str, str]) -> None:
    """Of 8,190 bytes, aiohttp's limit, a token of a single sign-on with its groups is refused."""
    async with (
        _serving() as address,
        aiohttp.ClientSession(headers=headers) as http,
        http.post(f"http://{address}/post", json={"x": 1}) as response,
    ):
        assert response.status == 200


@pytest.mark.parametrize("path", ["/post", "/nowhere"])
async def test_more_headers_than_that_are_refused_with_the_limit(path: str) -> None:
    headers = {f"X-Group-{index}": "g" * 16_000 for index in range(5)}
    async with (
        _serving() as address,
        aiohttp.ClientSession(headers=headers) as http,
        http.post(f"http://{address}{path}", json={"x": 1}) as response,
    ):
        assert response.status == 431
        assert "65536 for all headers" in (await response.json())["error"]["message"]


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "TRACE", "PROPFIND"])
async def test_a_wrong_method_is_answered_with_those_that_are_right(method: str) -> None:
    async with (
        _serving() as address,
        aiohttp.ClientSession() as http,
        http.request(method, f"http://{address}/post") as response,
    ):
        assert (response.status, response.headers["Allow"]) == (405, "POST")


@pytest.mark.parametrize("path", ["/post", "/nowhere", "http://rebound.example/post"])
async def test_a_rebound_name_is_refused_on_every_path(path: str) -> None:
    hosts = AllowedHosts.of_listener("127.0.0.1")
    async with _serving(hosts=hosts) as address:
        host, port = address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"GET {path} HTTP/1.1\r\nHost: rebound.example\r\nConnection: close\r\n\r\n".encode())
        answer = await reader.read()
        writer.close()
    assert answer.startswith(b"HTTP/1.1 403 ")


async def test_other_origins_get_no_consent_unless_they_are_allowed() -> None:
    headers = {
        "Origin": "https://chat.example.com",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "content-type,authorization",
    }
    async with aiohttp.ClientSession(headers=headers) as http:
        async with _serving() as address, http.options(f"http://{address}/post") as response:
            assert response.status == 405
            assert "Access-Control-Allow-Origin" not in response.headers
        async with _serving(origins=["https://chat.example.com"]) as address:
            async with http.options(f"http://{address}/post") as response:
                assert response.status == 204
                assert response.headers["Access-Control-Allow-Origin"] == "https://chat.example.com"
                assert response.headers["Access-Control-Allow-Headers"] == "content-type,authorization"
            async with http.post(f"http://{address}/post", json={"x": 1}) as response:
                assert response.headers["Access-Control-Allow-Origin"] == "https://chat.example.com"
            other = {"Origin": "https://other.example"}
            async with http.post(f"http://{address}/post", json={"x": 1}, headers=other) as response:
                assert "Access-Control-Allow-Origin" not in response.headers


async def test_a_client_that_reads_no_answer_is_disconnected() -> None:
    async with _serving(write_timeout_s=0.05) as address:
        host, port = address.split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n")
        request = await _SEEN.get()

        async def is_disconnected() -> bool:
            return request.transport is None

        await eventually(is_disconnected)
        writer.close()
