"""The console of a router with API keys, in a real browser: the router's own authentication stands before it."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from router_svc.api.authentication import client_of
from router_svc.clients.access import Access
from tests.support.browser import Browser, find_chromium, open_browser
from tests.support.console import FakeCluster, many_workers, serving

CHROMIUM = find_chromium()
pytestmark = [
    pytest.mark.deploy,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: install it, for example Debian's package chromium"),
]

ADMIN = "the-key-of-an-admin"
TENANT = "the-key-of-a-tenant"
OLD = "chatcmpl-old"
FORM = "#problems form.key"
FIELD = f"{FORM} input"
LIVE = "document.querySelector('#age').innerText === 'live'"
WORKERS = "document.querySelector('[data-tier=decode]')?.innerText.includes('decode-0')"
#: Where a page can leave something, as one text.
LEFT = """(async () => JSON.stringify([
  location.href, document.cookie, {...localStorage}, {...sessionStorage}, history.state, await caches.keys(),
  await indexedDB.databases(), performance.getEntries().map((entry) => entry.name)]))()"""


class LockedCluster(FakeCluster):
    """Workers and one request, whose router has an admin's and a tenant's key, and answers chats."""

    def __init__(self, directory: Path) -> None:
        super().__init__(many_workers(1, 2))
        self.add_request(OLD)
        keys = [
            {"id": name, "sha256": hashlib.sha256(key.encode()).hexdigest(), "admin": name == "admin"}
            for name, key in (("admin", ADMIN), ("tenant", TENANT))
        ]
        path = directory / "keys.json"
        path.write_text(json.dumps({"keys": keys}), encoding="utf-8")
        self.access = Access((), path)
        #: Who has sent each chat.
        self.senders: list[str] = []

    async def chat(self, request: web.Request) -> web.StreamResponse:
        self.senders.append(client_of(request).id)
        self.add_request("chatcmpl-new", ago_s=1)
        headers = {"Content-Type": "text/event-stream", "X-Request-Id": "new"}
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        chunk = {"choices": [{"index": 0, "delta": {"content": "An answer."}, "finish_reason": "stop"}]}
        await response.write(b"data: %b\n\ndata: [DONE]\n\n" % json.dumps(chunk).encode())
        return response


@pytest.fixture
def fake(tmp_path: Path) -> LockedCluster:
    return LockedCluster(tmp_path)


@asynccontextmanager
async def locked_page(fake: LockedCluster, address: str = "") -> AsyncIterator[Browser]:
    """A browser that shows the form. Errors in the page fail, such as violations of its policy; refusals are expected.

    At the end the keys must be nowhere but in the page's memory.
    """
    assert CHROMIUM is not None
    routes = [web.post("/v1/chat/completions", fake.chat)]
    async with serving(fake, routes=routes, access=fake.access) as (url, _), open_browser(CHROMIUM) as browser:
        await browser.resize(1360, 900)
        await browser.open(f"{url}/console/{address}")
        await browser.until(f"document.querySelector('{FIELD}') !== null")
        yield browser
        assert [error for error in browser.errors if not re.search(r"status of 40[13]", error)] == []
        left = await browser.evaluate(LEFT)
        assert "/console/events" in left
        assert ADMIN not in left
        assert TENANT not in left


async def enter(browser: Browser, key: str) -> None:
    """Replaces what is in the field, and sends it by keyboard."""
    await browser.evaluate(f"document.querySelector('{FIELD}').focus()")
    await browser.evaluate("document.activeElement.select()")
    await browser.write(key)
    await browser.press("Enter")


async def assert_nothing_is_shown(browser: Browser) -> None:
    """Neither what the router sends nor what a page could know of it."""
    page = await browser.evaluate("document.documentElement.outerHTML")
    assert [word for word in ("decode-0", "prefill-0", "chatcmpl-", "tiny") if word in page] == []
    assert await browser.evaluate("document.querySelector('#figures').hidden")
    assert await browser.text("#health") == "No access"


async def test_without_a_key_the_page_asks_for_one_and_shows_nothing(fake: LockedCluster) -> None:
    """Fails when the events need no key, or when the page forgets to ask."""
    async with locked_page(fake) as browser:
        assert "This router asks for an API key" in await browser.text("#problems")
        await assert_nothing_is_shown(browser)
        policy = "fetch('.').then((answer) => answer.headers.get('Content-Security-Policy'))"
        assert "default-src 'none'; script-src 'self'; style-src 'self'" in await browser.evaluate(policy)
        # It tries no further by itself: nothing but another key would change the answer.
        assert await browser.evaluate("!/next try/.test(document.querySelector('#problems').innerText)")


@pytest.mark.parametrize(
    ("key", "title", "reason"),
    [
        ("wrong", "The API key was refused", "The API key is unknown."),
        ("clé-\u2026", "The API key was refused", "The API key has characters that keys do not have."),
        (TENANT, "This API key does not open the console", "It takes an admin's key."),
    ],
    ids=["unknown", "no header can carry it", "a tenant's"],
)
async def test_a_key_that_does_not_open_it_is_refused_with_its_reason_and_the_form_stays(
    fake: LockedCluster, key: str, title: str, reason: str
) -> None:
    async with locked_page(fake) as browser:
        await browser.evaluate(f"document.querySelector('{FIELD}').dataset.same = 'yes'")
        await enter(browser, key)
        await browser.until(f"document.querySelector('#problems').innerText.includes({json.dumps(title)})")
        assert reason in await browser.text("#problems")
        await assert_nothing_is_shown(browser)
        # The same field, with the focus in it, takes the next key.
        assert await browser.evaluate("document.activeElement.dataset.same") == "yes"
        await enter(browser, ADMIN)
        await browser.until(WORKERS)


async def test_an_admins_key_opens_the_live_stream(fake: LockedCluster) -> None:
    """Fails when the page sends no `Authorization`."""
    async with locked_page(fake) as browser:
        await enter(browser, f" {ADMIN} ")
        await browser.until(f"{WORKERS} && {LIVE}")
        await browser.until(f"document.querySelector('#view-cluster .requests').innerHTML.includes('{OLD}')")
        assert await browser.evaluate(f"document.querySelector('{FORM}') === null")
        fake.add_request("chatcmpl-just-sent", ago_s=0)
        await browser.until("document.querySelector('#view-cluster .requests').innerHTML.includes('just-sent')")


async def test_the_playground_sends_the_key(fake: LockedCluster) -> None:
    async with locked_page(fake) as browser:
        await enter(browser, ADMIN)
        await browser.until(LIVE)
        await browser.click("nav [data-view=playground]")
        await browser.click("#prompt")
        await browser.write("Hello")
        await browser.press("Enter")
        await browser.until("document.querySelector('.assistant .text')?.innerText === 'An answer.'")
        await browser.until("document.querySelector('.assistant .phases').hidden === false")
        assert fake.senders == ["admin"]
        await browser.click("nav [data-view=requests]")
        await browser.until("document.querySelector('#view-requests .requests').innerHTML.includes('chatcmpl-new')")


async def test_a_request_opened_by_its_address_is_shown_once_there_is_a_key(fake: LockedCluster) -> None:
    """It is in no list of recent requests, so nothing but the key makes the page load it again."""
    record = fake.add_request(OLD)
    fake.recent.newest = lambda limit=None: []  # type: ignore[method-assign]
    async with locked_page(fake, f"#/requests/{record.request_id}") as browser:
        await browser.until("document.querySelector('.trace .error')?.innerText.includes('There is no API key.')")
        await enter(browser, ADMIN)
        await browser.until("document.querySelectorAll('.trace .bars li').length > 0")
        assert await browser.evaluate("document.querySelector('.trace .error').hidden")


async def test_the_key_is_gone_when_the_page_is_loaded_again(fake: LockedCluster) -> None:
    async with locked_page(fake) as browser:
        await enter(browser, ADMIN)
        await browser.until(WORKERS)
        await browser.evaluate("window.isOld = true")
        await browser.send("Page.reload")
        await browser.until(f"!window.isOld && document.querySelector('{FIELD}') !== null")
        assert await browser.evaluate(f"document.querySelector('{FIELD}').value") == ""
        await assert_nothing_is_shown(browser)


async def test_the_form_is_used_by_keyboard_and_has_a_label(fake: LockedCluster) -> None:
    async with locked_page(fake) as browser:
        for _ in range(7):
            await browser.press("Tab")
        assert await browser.evaluate(f"document.activeElement === document.querySelector('{FIELD}')")
        assert await browser.evaluate("[...document.activeElement.labels].map((label) => label.innerText)") == [
            "API key"
        ]
        assert await browser.evaluate("document.activeElement.type") == "password"
        await browser.write(ADMIN)
        await browser.press("Tab")
        assert await browser.evaluate("document.activeElement.innerText") == "Use"
        assert await browser.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
        await browser.press("Space")
        await browser.until(WORKERS)
        # The button is gone with its form: the keyboard goes on where the content is.
        await browser.until("document.activeElement.id === 'main'")
