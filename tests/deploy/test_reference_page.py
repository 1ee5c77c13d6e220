"""The page of the OpenAPI document in a real browser: it shows everything, needs nothing else, and fits a phone."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from pdserve.net.admin import bound_socket, serve_http
from router_svc.api.http_app import HttpRules, make_app
from router_svc.api.reference.document import make_document
from router_svc.api.reference.operations import OPERATIONS
from router_svc.api.reference.page import Reference
from tests.support.browser import Browser, find_chromium, open_browser

CHROMIUM = find_chromium()
pytestmark = [
    pytest.mark.deploy,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: install it, for example Debian's package chromium"),
]
#: Contrast of an element's text with what is behind it, as WCAG 2 computes it.
_CONTRAST = """
((element) => {
  const channels = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const luminance = (colour) => channels(colour).slice(0, 3).map((value) => value / 255)
    .map((value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4))
    .reduce((sum, value, index) => sum + value * [0.2126, 0.7152, 0.0722][index], 0);
  const behind = (each) => {
    const colour = getComputedStyle(each).backgroundColor;
    return channels(colour)[3] === 0 ? behind(each.parentElement) : colour;
  };
  const [high, low] = [luminance(getComputedStyle(element).color), luminance(behind(element))].sort((a, b) => b - a);
  return (high + 0.05) / (low + 0.05);
})
"""


@asynccontextmanager
async def page(width: int = 1360) -> AsyncIterator[Browser]:
    """A browser that shows the page. Errors in it fail, among them loads that its policy forbids."""
    assert CHROMIUM is not None
    reference = Reference()
    reference.describe([web.RouteDef(method, path, _unused, {}) for method, path in OPERATIONS])
    app = make_app([reference.routes()], HttpRules(max_body_bytes=1024))
    with bound_socket("127.0.0.1", 0, flag="--port") as listener:
        async with serve_http(app, listener) as address, open_browser(CHROMIUM) as browser:
            await browser.resize(width, 900)
            await browser.open(f"http://{address}/docs")
            await browser.until("!document.querySelector('#reference').hidden")
            yield browser
            loaded = await browser.evaluate("performance.getEntriesByType('resource').map((each) => each.name)")
            assert [url for url in loaded if not url.startswith(f"http://{address}/")] == []
            assert browser.errors == []


async def _unused(_: web.Request) -> web.StreamResponse:
    raise NotImplementedError


async def test_every_operation_and_schema_is_shown_and_can_be_reached() -> None:
    document = make_document(OPERATIONS)
    async with page() as browser:
        links = await browser.evaluate("[...document.querySelectorAll('#contents a')].map((each) => each.hash)")
        missing = await browser.evaluate(
            "[...document.querySelectorAll('a[href^=\"#\"]')].map((each) => decodeURIComponent(each.hash.slice(1)))"
            ".filter((id) => id && !document.getElementById(id))"
        )
        assert missing == []
        assert len(links) == len(set(links)) == len(OPERATIONS) + len(document["components"]["schemas"])


@pytest.mark.parametrize("width", [360, 768, 1360])
async def test_nothing_is_wider_than_the_screen(width: int) -> None:
    async with page(width) as browser:
        assert await browser.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("theme", ["light", "dark"])
async def test_texts_can_be_read_in_both_themes(theme: str) -> None:
    async with page() as browser:
        await browser.prefer(prefers_color_scheme=theme)
        selectors = (
            ".method[data-method=get]",
            ".method[data-method=post]",
            ".required",
            ".kind",
            ".note",
            "dt",
            "p a",
        )
        for selector in selectors:
            assert await browser.evaluate(f"{_CONTRAST}(document.querySelector('{selector}'))") >= 4.5, selector


async def test_the_page_can_be_used_with_the_keyboard() -> None:
    async with page() as browser:
        await browser.press("Tab")
        assert await browser.evaluate("document.activeElement.className") == "skip"
        await browser.press("Enter")
        assert await browser.evaluate("location.hash") == "#main"
        summary = "document.querySelector('details > summary')"
        await browser.evaluate(f"{summary}.focus()")
        await browser.press("Enter")
        assert await browser.evaluate(f"{summary}.parentElement.open")
        unnamed = await browser.evaluate(
            "[...document.querySelectorAll('section, nav')].filter((each) => !each.ariaLabel && "
            "!document.getElementById(each.getAttribute('aria-labelledby'))?.textContent).length"
        )
        assert unnamed == 0
