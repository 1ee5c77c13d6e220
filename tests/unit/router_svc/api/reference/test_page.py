"""The files of the page: headers, and what they may not contain."""

from __future__ import annotations

import asyncio
import re
import tomllib

import aiohttp
import pytest
from aiohttp import web

from pdserve.net.admin import bound_socket, serve_http
from router_svc.api.http_app import HttpRules, make_app
from router_svc.api.reference.page import SHARED, STATIC, Reference
from tests.arch.documents import ROOT
from tests.support.callbacks import LIMIT_S, longest_callback

FILES = sorted(path.name for path in STATIC.iterdir())


async def test_every_file_comes_with_a_policy_that_forbids_other_hosts() -> None:
    reference = Reference()
    app = make_app([reference.routes()], HttpRules(max_body_bytes=1024))
    with bound_socket("127.0.0.1", 0, flag="--port") as listener:
        async with serve_http(app, listener) as address, aiohttp.ClientSession() as http:
            for name in ("", *FILES, *SHARED):
                async with http.get(f"http://{address}/docs/{name}") as response:
                    assert response.status == 200, name
                    policy = response.headers["Content-Security-Policy"].split("; ")
                    assert {"default-src 'none'", "connect-src 'self'", "trusted-types 'none'"} <= {*policy}
                    assert response.headers["X-Content-Type-Options"] == "nosniff"
            async with http.get(f"http://{address}/docs", allow_redirects=False) as response:
                assert (response.status, response.headers["Location"]) == (308, "docs/")


async def test_many_first_readers_get_one_document_and_the_event_loop_goes_on() -> None:
    async def unused(_: web.Request) -> web.StreamResponse:
        raise NotImplementedError

    async def read_first() -> None:
        reference = Reference()
        reference.describe([web.post("/v1/chat/completions", unused), web.get("/v1/models/{name:.+}", unused)])
        app = make_app([reference.routes()], HttpRules(max_body_bytes=1024))
        with bound_socket("127.0.0.1", 0, flag="--port") as listener:
            async with serve_http(app, listener) as address, aiohttp.ClientSession() as http:

                async def tag() -> str:
                    async with http.get(f"http://{address}/openapi.json") as response:
                        assert set((await response.json())["paths"]) == {"/v1/chat/completions", "/v1/models/{name}"}
                        return response.headers["ETag"]

                assert len({*await asyncio.gather(*(tag() for _ in range(5)))}) == 1

    longest = await longest_callback(read_first)
    assert longest.seconds < LIMIT_S, longest.callback


def test_the_files_are_package_data() -> None:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["package-data"]
    assert data["router_svc.api.reference"] == ["static/*"]
    assert {name.rpartition(".")[2] for name in FILES} == {"html", "css", "js"}


@pytest.mark.parametrize("name", FILES)
def test_nothing_is_inline_parses_markup_or_comes_from_elsewhere(name: str) -> None:
    text = (STATIC / name).read_text(encoding="utf-8")
    assert re.findall(r"https?://|innerHTML|insertAdjacentHTML|document\.write|\beval\(|\sstyle=|\son\w+=", text) == []
    assert re.findall(r'from "(?!\./)|import\(|<script[^>]*>(?!</script>)|(?:src|href)="//|@import|url\(', text) == []
