"""The files of the console: headers, caching, and what they may not contain."""

from __future__ import annotations

import re
import tomllib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from yarl import URL

from router_svc.api.console.page import STATIC
from tests.arch.documents import ROOT
from tests.support.console import FakeCluster, serving

Get = Callable[..., Awaitable[aiohttp.ClientResponse]]
FILES = sorted(path.name for path in STATIC.iterdir())


@asynccontextmanager
async def session() -> AsyncIterator[Get]:
    """Gets paths of a running console."""
    async with serving(FakeCluster()) as (url, _), aiohttp.ClientSession() as http:

        async def get(path: str, **options: Any) -> aiohttp.ClientResponse:
            # Encoded: what a path hides must not be resolved before it arrives.
            async with http.get(URL(url + path, encoded=True), **options) as response:
                await response.read()
                return response

        yield get


async def test_the_page_is_found_with_and_without_a_slash() -> None:
    async with session() as get:
        page = await get("/console")
        redirect = await get("/console", allow_redirects=False)
    assert (page.status, page.url.path) == (200, "/console/")
    assert (redirect.status, redirect.headers["Location"]) == (308, "console/")


async def test_every_file_has_its_type_and_forbids_everything_else() -> None:
    types = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml", "": "text/html"}
    async with session() as get:
        for name in ("", *FILES):
            response = await get(f"/console/{name}")
            assert response.status == 200
            assert response.content_type == types[name.rpartition(".")[2]]
            policy = response.headers["Content-Security-Policy"].split("; ")
            assert {"default-src 'none'", "script-src 'self'", "style-src 'self'", "connect-src 'self'"} <= {*policy}
            assert {"frame-ancestors 'none'", "base-uri 'none'", "form-action 'none'"} <= {*policy}
            assert "unsafe" not in " ".join(policy)
            assert response.headers["X-Content-Type-Options"] == "nosniff"
            assert response.headers["Referrer-Policy"] == "no-referrer"


async def test_a_known_file_is_not_sent_again() -> None:
    async with session() as get:
        first = await get("/console/main.js")
        again = await get("/console/main.js", headers={"If-None-Match": first.headers["ETag"]})
        changed = await get("/console/main.js", headers={"If-None-Match": '"another"'})
    assert first.headers["Cache-Control"] == "no-cache"
    assert (again.status, again.headers["ETag"]) == (304, first.headers["ETag"])
    assert "Content-Security-Policy" in again.headers
    assert changed.status == 200


async def test_no_other_file_is_served() -> None:
    """CVE-2026-7302. Fails where a name is looked up below `STATIC`, not among the files in memory."""
    async with session() as get:
        for name in ("nothing.js", "..%2fpage.py", "%2e%2e%2fpage.py", "..", "../page.py", "page.py", "static"):
            assert (await get(f"/console/{name}")).status == 404, name


def test_the_files_are_package_data_and_of_known_types() -> None:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    assert data["router_svc.api.console"] == ["static/*"]
    assert {name.rpartition(".")[2] for name in FILES} == {"html", "css", "js", "svg"}


def test_the_page_has_nothing_inline_and_nothing_from_elsewhere() -> None:
    html = (STATIC / "index.html").read_text()
    assert re.findall(r"<script[^>]*>(?!</script>)", html) == []
    assert re.search(r"\sstyle=|<style|\son\w+=", html) is None
    assert re.findall(r'(?:src|href)="(?:https?:)?//', html) == []


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith(".js")])
def test_no_module_parses_markup_or_reaches_elsewhere(name: str) -> None:
    code = (STATIC / name).read_text()
    forbidden = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser|srcdoc"
    assert re.findall(forbidden, code) == []
    assert re.findall(r'from "(?!\./)|import\(', code) == []
    assert [url for url in re.findall(r"https?://[^\"]+", code) if not url.startswith("http://www.w3.org/")] == []


def test_the_bundle_stays_small() -> None:
    assert sum((STATIC / name).stat().st_size for name in FILES) < 150_000
