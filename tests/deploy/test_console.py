"""The console in a real browser: every view is clicked through, and any error in the page fails."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from pdserve.base.ids import Epoch, WorkerId
from pdserve.peers.workers import TransportReport, WorkerLoad
from router_svc.records.events import WorkerChosen
from router_svc.records.request_state import RequestState
from tests.support.browser import Browser, find_chromium, open_browser
from tests.support.cluster import Cluster, running_cluster
from tests.support.console import FakeCluster, many_workers, serving
from tests.support.records import worker_record

CHROMIUM = find_chromium()
pytestmark = [
    pytest.mark.deploy,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: install it, for example Debian's package chromium"),
]

#: Longer than --local-prefill-threshold, so that it is handed over; what is before it makes it uncached.
QUESTION = "Explain in two sentences how plants turn light, water and carbon dioxide into sugar. " * 6
MARKUP = "<img src=x onerror=document.title='owned'><script>document.title='owned'</script><b>bold</b>"
WIDTHS = (400, 768, 1360)
VIEWS = ("cluster", "requests", "playground")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One prefill and one decode worker, and prompts that are handed over whatever the load."""
    flags = ("--kv-cache-memory", "512MiB", "--local-prefill", "threshold")
    with running_cluster(tmp_path_factory.mktemp("cluster"), *flags) as running:
        yield running


@asynccontextmanager
async def page(url: str, *, allowed: str = r"(?!)", width: int = 1360) -> AsyncIterator[Browser]:
    """A browser that shows a console. Errors in the page fail, unless the pattern `allowed` matches them."""
    assert CHROMIUM is not None
    async with open_browser(CHROMIUM) as browser:
        await browser.resize(width, 900)
        await browser.open(f"{url}/console")
        await browser.until("document.querySelector('#health').dataset.level !== 'unknown'")
        yield browser
        assert [error for error in browser.errors if not re.search(allowed, error)] == []


def ask(cluster: Cluster, text: str) -> str:
    """Sends a chat, and returns its id."""
    client = cluster.client()
    answer = client.chat.completions.create(
        model=cluster.view().router.model,
        messages=[{"role": "user", "content": text}],
        max_tokens=24,
        temperature=0,
    )
    client.close()
    return answer.id


async def open_playground(browser: Browser) -> None:
    """Opens the view: the page hears of the click's new address in an event of its own."""
    await browser.click("nav [data-view=playground]")
    await browser.until("document.body.dataset.view === 'playground'")


# With a real cluster


async def test_a_request_that_was_just_sent_is_listed_with_its_waterfall(cluster: Cluster) -> None:
    async with page(cluster.base_url) as browser:
        await browser.until("document.querySelector('#health').dataset.level === 'ok'")
        request_id = ask(cluster, f"Listed. {QUESTION}")
        row = f"#view-requests a[href='#/requests/{request_id}']"
        await browser.click("nav [data-view=requests]")
        await browser.until(f"document.querySelector({json.dumps(row)})?.innerText.includes('finished')")
        strip = await browser.evaluate(f"document.querySelector({json.dumps(row)}).querySelector('.strip').ariaLabel")
        assert [each.split()[0] for each in strip.split(", ")] == ["queue", "reserve", "prefill", "wire", "decode"]
        await browser.click(row)
        await browser.until("document.querySelectorAll('.trace .bars li').length >= 7")
        bars = await browser.text(".trace .bars")
        for name in ("queue", "reserve", "dispatch", "prefill", "wire", "decode", "prefill-0", "decode-0"):
            assert name in bars
        decisions = await browser.text(".trace .decisions")
        assert "decode on decode-0" in decisions
        assert "prefill on prefill-0" in decisions
        assert "tokens cached, cost" in decisions
        assert re.search(r"TTFT\s+[\d.]+ m?s", await browser.text(".trace .times"))
        assert "bytes on the wire" in await browser.text(".trace .facts")
        assert request_id in await browser.text(".trace h2")


async def test_tiers_and_workers_are_live(cluster: Cluster) -> None:
    async with page(cluster.base_url) as browser:
        for tier in ("prefill", "decode"):
            card = f"[data-tier={tier}]"
            assert "1 of 1 ready" in await browser.text(f"{card} .counts")
            await browser.click(f"{card} .vlist-body button")
            facts = await browser.text(f"{card} .detail")
            assert "grpc address" in facts
            assert "127.0.0.1:" in facts
        ask(cluster, QUESTION)
        await browser.until("document.querySelectorAll('#view-cluster .requests li').length > 0")
        await browser.until("/[1-9]/.test(document.querySelector('.below .facts').innerText)")


async def test_the_playground_streams_an_answer_with_times_and_phases(cluster: Cluster) -> None:
    async with page(cluster.base_url, allowed="status of 400") as browser:
        await open_playground(browser)
        await browser.click("#prompt")
        await browser.write(f"About plants. {QUESTION}")
        await browser.press("Enter")
        await browser.until("document.querySelector('.assistant .phases')?.hidden === false", timeout_s=90)
        took = await browser.text(".assistant .took")
        assert re.search(r"^TTFT [\d.]+ m?s · TPOT [\d.]+ m?s \([\d.]+ tokens/s\) · \d+ tokens · (stop|length)$", took)
        assert len(await browser.text(".assistant .text")) > 20
        phases = await browser.text(".assistant .phases")
        for phase in ("queue", "reserve", "prefill", "wire", "decode"):
            assert re.search(rf"{phase}\s*[\d.]+ m?s", phases), phases
        # What the API refuses is said in the API's words.
        await browser.evaluate("document.querySelectorAll('.settings input')[0].value = '9'")
        await browser.click("#prompt")
        await browser.write("Hello")
        await browser.press("Enter")
        assert "temperature" in await browser.text(".turn:last-child .error")
        await browser.click(".assistant .phases a")
        await browser.until("location.hash.startsWith('#/requests/chatcmpl-')")
        await browser.until("document.querySelectorAll('.trace .bars li').length >= 7")


async def test_stop_ends_the_request_on_the_workers(cluster: Cluster) -> None:
    async with page(cluster.base_url) as browser:
        await open_playground(browser)
        # Greedy, because a random answer may be short.
        for index, value in enumerate(("0", "4000")):
            await browser.evaluate(f"document.querySelectorAll('.settings input')[{index}].value = '{value}'")
        await browser.click("#prompt")
        await browser.write("Write a very long story about a town.")
        await browser.press("Enter")
        await browser.until("document.querySelector('.assistant .text')?.innerText.length > 10")
        await browser.click(".stop")
        await browser.until("document.querySelector('.assistant .took').innerText.includes('stopped by you')")
        await cluster.until_async(cluster.is_idle, "the stopped request is released")
        await browser.click("nav [data-view=requests]")
        await browser.until("document.querySelector('#view-requests .requests .state')?.innerText === 'cancelled'")


async def test_the_page_outlives_the_router(cluster: Cluster) -> None:
    """`pdserve up` starts the router again; the page says what happens, and goes on by itself."""
    async with page(cluster.base_url, allowed="ERR_|Failed to fetch|network error|status of 503") as browser:
        await browser.until("document.querySelector('#health').dataset.level === 'ok'")
        cluster.kill("router", signal.SIGKILL)
        await browser.until("document.querySelector('#health').dataset.level === 'lost'")
        assert "The router does not answer" in await browser.text("#problems")
        assert await browser.evaluate("document.body.classList.contains('stale')")
        await browser.until("document.querySelector('#health').dataset.level === 'ok'", timeout_s=90)
        assert await browser.evaluate("!document.body.classList.contains('stale')")
    cluster.wait_tiers(prefill=1, decode=1)


# With a cluster of records


def busy() -> FakeCluster:
    """Seven workers, requests in every state, and nothing wrong."""
    fake = FakeCluster(many_workers(3, 4))
    why = "0 of 300 tokens cached, cost 364; next best decode-0 costs 428"
    chosen = [WorkerChosen(worker=WorkerId("decode-1"), epoch=Epoch(1), tier="decode", why=why)]
    for index in range(20):
        fake.add_request(f"chatcmpl-{index:032x}", ago_s=100 - index, chosen=chosen)
    fake.add_request("chatcmpl-failed", state=RequestState.FAILED, ago_s=5, error="Worker decode-3 was lost.")
    fake.add_request("chatcmpl-running", state=RequestState.DECODING, ago_s=1)
    return fake


async def test_the_theme_follows_the_system_until_one_is_chosen() -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    async with serving(busy()) as (url, _), page(url) as browser:
        await browser.prefer(prefers_color_scheme="light")
        light = await browser.evaluate(background)
        await browser.prefer(prefers_color_scheme="dark")
        dark = await browser.evaluate(background)
        assert light != dark
        # The page hears of it in an event of its own, which may come after the colours.
        await browser.until("document.getElementById('theme').ariaPressed === 'true'")
        await browser.click("#theme")
        assert await browser.evaluate(background) == light
        await browser.open(f"{url}/console/")
        assert await browser.evaluate(background) == light
        assert await browser.evaluate("document.getElementById('theme').ariaPressed") == "false"


FOCUSED = "document.activeElement.innerText || document.activeElement.ariaLabel || document.activeElement.id"


async def test_everything_can_be_reached_and_used_by_keyboard() -> None:
    async with serving(busy()) as (url, _), page(url) as browser:
        await browser.until("document.querySelectorAll('#view-cluster .requests a').length > 3")
        names = []
        for _ in range(8):
            await browser.press("Tab")
            names.append(await browser.evaluate(FOCUSED))
            outline = await browser.evaluate("getComputedStyle(document.activeElement).outlineStyle")
            assert outline != "none", names[-1]
        assert names[:6] == ["Skip to content", "pdserve", "Cluster", "Requests", "Playground", "Dark theme"]
        # Rows are one stop, and the arrow keys move among them.
        await browser.evaluate("document.querySelector('#view-cluster .requests a').focus()")
        await browser.press("ArrowDown")
        await browser.press("ArrowDown")
        second = await browser.evaluate("document.activeElement.getAttribute('href')")
        stops = await browser.evaluate("document.querySelectorAll('#view-cluster .requests a[tabindex=\"0\"]').length")
        assert stops == 1
        await browser.press("Enter")
        await browser.until(f"location.hash === {json.dumps(second)}")
        await browser.until("document.querySelectorAll('.trace .bars li').length > 0")
        # The skip link leads to the content without leaving the view.
        await browser.evaluate("document.querySelector('.skip').focus()")
        await browser.press("Enter")
        assert await browser.evaluate("document.activeElement.id") == "main"
        assert await browser.evaluate("!document.getElementById('view-requests').hidden")


async def test_every_control_has_a_name() -> None:
    roles = ("button", "link", "textbox", "searchbox", "combobox", "spinbutton", "image", "list", "table", "log")
    async with serving(busy()) as (url, _), page(url) as browser:
        for view in VIEWS:
            await browser.evaluate(f"location.hash = '#/{view}'")
            await browser.until(f"document.body.dataset.view === '{view}'")
            nodes = (await browser.send("Accessibility.getFullAXTree"))["nodes"]
            named = [node for node in nodes if not node.get("ignored") and node["role"]["value"] in roles]
            assert named
            nameless = [node for node in named if not node.get("name", {}).get("value")]
            assert [node["role"] for node in nameless if node["role"]["value"] != "list"] == [], view


#: Text whose contrast with what is behind it is below 4.5:1, as far as both are plain colours.
LOW_CONTRAST = """(() => {
  const numbers = (colour) => colour.match(/^rgba?\\(([^)]+)\\)$/)?.[1].split(/[ ,/]+/).map(Number);
  const linear = (v) => v <= 10.3 ? v / 3294.6 : ((v / 255 + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const behind = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const c = numbers(getComputedStyle(e).backgroundColor);
      if (c && (c[3] ?? 1) === 1) return c;
    }
  };
  const found = [];
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!own || !element.checkVisibility() || element.closest(".unseen, .skip, option")) continue;
    const [c, b] = [numbers(getComputedStyle(element).color), behind(element)];
    if (!c || !b) continue;
    const [high, low] = [light(c.slice(0, 3)), light(b.slice(0, 3))].sort((x, y) => y - x);
    const ratio = (high + 0.05) / (low + 0.05);
    if (ratio < 4.5) found.push(`${element.className || element.tagName} ${element.innerText} ${ratio.toFixed(2)}`);
  }
  return found;
})()"""


@pytest.mark.parametrize("theme", ["light", "dark"])
async def test_text_has_contrast_and_no_view_is_wider_than_its_window(theme: str) -> None:
    fake = busy()
    fake.set_load(0, WorkerLoad(), ready=False)
    fake.health.degraded["redis"] = "Redis does not answer"
    fake.gate.num_waiting = 500
    async with serving(fake) as (url, _), page(url) as browser:
        await browser.prefer(prefers_color_scheme=theme, prefers_reduced_motion="reduce")
        for width in WIDTHS:
            await browser.resize(width, 900)
            for address in ("cluster", "requests", "requests/chatcmpl-failed", "playground"):
                await browser.evaluate(f"location.hash = '#/{address}'")
                await browser.until(f"document.body.dataset.view === '{address.split('/')[0]}'")
                await browser.until("document.querySelectorAll('.problem').length === 3")
                assert await browser.evaluate(LOW_CONTRAST) == [], (width, address)
                overflow = await browser.evaluate("document.scrollingElement.scrollWidth")
                assert overflow <= width, (width, address)


async def test_with_2000_workers_the_page_stays_small_and_quick() -> None:
    fake = FakeCluster(many_workers(900, 1100))
    async with serving(fake, interval_s=0.2) as (url, _), page(url) as browser:
        await browser.until("document.querySelectorAll('[data-tier=decode] .map i').length === 1100")
        assert await browser.evaluate("document.querySelectorAll('[data-tier=decode] .vlist-body .row').length") < 40
        # Keyboard to the last row: only rows in view exist, and the focus stays.
        await browser.evaluate("document.querySelector('[data-tier=decode] .vlist-body button').focus()")
        await browser.press("End")
        await browser.until("document.activeElement.innerText === 'decode-1099'")
        fake.set_load(1999, WorkerLoad(running=8, free_blocks=1))
        await browser.until("document.activeElement.closest('[role=row]').innerText.includes('8 / 8')")
        await browser.click("[data-tier=decode] input[type=search]")
        await browser.write("-77")
        await browser.until(
            "document.querySelector('[data-tier=decode] .tools [role=status]').innerText === '11 of 1,100'"
        )
        for index in range(2000):
            fake.set_load(index, WorkerLoad(running=index % 7, free_blocks=index % 50))
        await browser.until("document.querySelector('[data-tier=prefill] .vlist-body .c-running').innerText === '0'")


async def test_what_is_wrong_is_visible_at_once() -> None:
    fake = FakeCluster([worker_record("decode-0")])
    async with serving(fake) as (url, _), page(url) as browser:
        await browser.until("document.querySelector('#problems').innerText.includes('The prefill tier is missing')")
        await browser.until("document.querySelector('[data-tier=prefill]').dataset.level === 'bad'")
        assert "No prefill worker is registered." in await browser.text("[data-tier=prefill]")
        fake.directory.workers.clear()
        fake.health.not_ready = "no decode worker is ready"
        await browser.until("document.querySelector('#health').innerText === 'Not serving'")
        assert "Requests are refused with 503" in await browser.text("#problems")
        assert "No request yet." in await browser.text("#view-cluster")


async def test_a_trace_that_is_gone_and_a_refused_console_say_so() -> None:
    fake = busy()
    async with serving(fake, max_readers=1) as (url, _), page(url, allowed="status of (404|429)") as browser:
        await browser.evaluate("location.hash = '#/requests/cmpl-unknown'")
        assert "Request cmpl-unknown is unknown." in await browser.text(".trace .error")
        async with page(url, allowed="status of 429") as second:
            assert "The router refuses this console" in await second.text("#problems")
            assert "This router has 1 open consoles, limit 1" in await second.text("#problems")


class ScriptedChat:
    """Answers chats with deltas, one list for each, and keeps the messages that were sent."""

    def __init__(self, *answers: list[dict[str, Any]]) -> None:
        self._answers = iter(answers)
        self.sent: list[list[dict[str, Any]]] = []
        self.routes = [web.post("/v1/chat/completions", self._answer)]

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.sent.append((await request.json())["messages"])
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for delta in next(self._answers):
            chunk = delta if "error" in delta else {"choices": [{"index": 0, "delta": delta}]}
            await response.write(b"data: %b\n\n" % json.dumps(chunk).encode())
        await response.write(b"data: [DONE]\n\n")
        return response


def thinking(text: str) -> dict[str, Any]:
    """A delta of thinking as the router sends it: under both names."""
    return {"reasoning": text, "reasoning_content": text}


def call(index: int, **fields: Any) -> dict[str, Any]:
    """A delta of one call."""
    return {"tool_calls": [{"index": index, **fields}]}


def weather(index: int, arguments: str) -> list[dict[str, Any]]:
    """The deltas of a call with these arguments, in two pieces."""
    return [
        call(index, id=f"call-{index}", type="function", function={"name": "weather", "arguments": arguments[:3]}),
        call(index, function={"arguments": arguments[3:]}),
    ]


@asynccontextmanager
async def playground(chat: ScriptedChat) -> AsyncIterator[Browser]:
    """The playground of a model that answers by a script."""
    async with serving(busy(), routes=chat.routes) as (url, _), page(url) as browser:
        await open_playground(browser)
        yield browser


async def say(browser: Browser, text: str, *, answers: int) -> None:
    """Sends a message, and waits until this many answers are there and the next message can be sent."""
    await browser.click("#prompt")
    await browser.write(text)
    await browser.press("Enter")
    await answered(browser, answers)


async def answered(browser: Browser, answers: int) -> None:
    """Waits until this many answers are there and the next message can be sent."""
    is_idle = "!document.querySelector('.log').hasAttribute('aria-busy')"
    await browser.until(f"document.querySelectorAll('.assistant').length === {answers} && {is_idle}")


async def test_thinking_is_folded_and_the_text_is_not() -> None:
    chat = ScriptedChat([thinking("Deep "), thinking("thought."), {"content": "Hello"}])
    async with playground(chat) as browser:
        await say(browser, "Hi", answers=1)
        assert await browser.text(".assistant .text") == "Hello"
        assert re.fullmatch(r"Thought for [\d.]+ m?s", await browser.text(".assistant summary"))
        assert await browser.evaluate("document.querySelector('.thinking').open") is False
        assert "Deep" not in await browser.text(".assistant")
        await browser.click(".assistant summary")
        assert await browser.text(".thinking .body") == "Deep thought."
        assert await browser.text(".assistant .took") != "no answer"
        assert await browser.evaluate(LOW_CONTRAST) == []


async def test_an_answer_of_thinking_alone_keeps_the_question() -> None:
    chat = ScriptedChat([thinking("Cut")], [{"content": "Hello"}])
    async with playground(chat) as browser:
        await say(browser, "one", answers=1)
        await say(browser, "two", answers=2)
    assert chat.sent[-1] == [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "", "reasoning": "Cut"},
        {"role": "user", "content": "two"},
    ]


async def test_an_answer_that_fails_at_once_leaves_no_question() -> None:
    chat = ScriptedChat([{"error": {"message": "Lost the worker."}}], [{"content": "Hello"}])
    async with playground(chat) as browser:
        await say(browser, "one", answers=1)
        assert await browser.text(".assistant .error") == "Lost the worker."
        await say(browser, "two", answers=2)
    assert chat.sent[-1] == [{"role": "user", "content": "two"}]


async def test_calls_are_folded_and_go_back_with_the_results_that_the_user_gives() -> None:
    chat = ScriptedChat([*weather(0, '{"city": "Rome"}'), *weather(1, "{}")], [{"content": "Fine."}])
    async with playground(chat) as browser:
        await say(browser, "Weather?", answers=1)
        assert await browser.evaluate("document.querySelectorAll('.call details[open]').length") == 0
        assert await browser.text(".call summary") == "Call of weather"
        await browser.click(".call summary")
        assert await browser.text(".call .body") == '{"city": "Rome"}'
        assert await browser.text(".call label") == "Result of weather"
        # Results need no message, and the second one stays empty.
        await browser.click(".call input")
        await browser.write("sunny")
        await browser.press("Enter")
        await answered(browser, 2)
        assert await browser.evaluate("document.querySelectorAll('.call input:read-only').length") == 2
        assert await browser.evaluate("document.querySelectorAll('.turn.user').length") == 1
    functions = [{"name": "weather", "arguments": '{"city": "Rome"}'}, {"name": "weather", "arguments": "{}"}]
    calls = [
        {"id": f"call-{index}", "type": "function", "function": function} for index, function in enumerate(functions)
    ]
    assert chat.sent[-1] == [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call-0", "content": "sunny"},
        {"role": "tool", "tool_call_id": "call-1", "content": ""},
    ]


async def test_a_call_that_was_cut_is_shown_and_takes_no_result() -> None:
    chat = ScriptedChat(weather(0, '{"city": "Ro'), [{"content": "Fine."}])
    async with playground(chat) as browser:
        await say(browser, "Weather?", answers=1)
        assert await browser.text(".call summary") == "Call of weather"
        assert await browser.evaluate("document.querySelector('.call label').hidden")
        await say(browser, "Again?", answers=2)
    assert chat.sent[-1] == [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "Again?"},
    ]


async def test_tools_that_are_not_json_are_refused_before_they_are_sent() -> None:
    chat = ScriptedChat()
    async with playground(chat) as browser:
        await browser.evaluate("document.querySelectorAll('.settings textarea')[1].value = '['")
        await say(browser, "Weather?", answers=1)
        assert "The tools are not JSON" in await browser.text(".assistant .error")
    assert chat.sent == []


async def test_names_and_answers_with_markup_are_only_text() -> None:
    function = {"name": MARKUP, "arguments": json.dumps({"city": MARKUP})}
    pieces = [{"content": piece} for piece in (MARKUP[:30], MARKUP[30:])]
    chat = ScriptedChat([thinking(MARKUP), *pieces, call(0, id="call-0", function=function)])
    evil = many_workers(1, 1)[1]
    workers = [worker_record(name) for name in (MARKUP, "__proto__", "constructor")]
    fake = FakeCluster([evil, *workers])
    fake.directory.workers[0] = worker_record("decode-x", tier="prefill")
    object.__setattr__(fake.directory.workers[1], "transport", TransportReport(paths={MARKUP: 1}, degraded=MARKUP))
    fake.health.degraded["redis"] = MARKUP
    chosen = [WorkerChosen(worker=WorkerId(MARKUP), epoch=Epoch(1), tier="decode", why=MARKUP)]
    fake.add_request("chatcmpl-a", state=RequestState.FAILED, error=MARKUP, chosen=chosen, endpoint=MARKUP)
    async with serving(fake, routes=chat.routes) as (url, _), page(url) as browser:
        await browser.until(f"document.querySelector('#view-cluster').innerText.includes({json.dumps(MARKUP)})")
        await browser.until("[...document.querySelectorAll('.c-worker button')].some(e => e.innerText === '__proto__')")
        await browser.evaluate("document.querySelector('[data-tier=decode] .vlist-body button').click()")
        await browser.evaluate("location.hash = '#/requests/chatcmpl-a'")
        await browser.until(f"document.querySelector('.trace .why')?.innerText === {json.dumps(MARKUP)}")
        assert MARKUP in await browser.text(".trace .error")
        await open_playground(browser)
        await browser.click("#prompt")
        await browser.write(MARKUP)
        await browser.press("Enter")
        await browser.until(f"document.querySelector('.assistant .text')?.innerText === {json.dumps(MARKUP)}")
        for selector in (".thinking", ".call"):
            await browser.click(f"{selector} summary")
            assert MARKUP in await browser.text(f"{selector} .body")
        assert MARKUP in await browser.text(".call label")
        assert await browser.evaluate("document.querySelectorAll('main script, main img, .log b').length") == 0
        assert "owned" not in await browser.evaluate("document.title")
