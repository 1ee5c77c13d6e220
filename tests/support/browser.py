"""A headless Chromium, driven over its DevTools protocol. It collects the page's errors, for which tests fail."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp

from tests.support.deadline import DEADLINE_S

_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--no-default-browser-check",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)
_KEYS = {
    "Tab": (9, ""),
    "Enter": (13, "\r"),
    "Escape": (27, ""),
    "Space": (32, " "),
    "PageDown": (34, ""),
    "End": (35, ""),
    "Home": (36, ""),
    "ArrowUp": (38, ""),
    "ArrowDown": (40, ""),
}


def find_chromium() -> str | None:
    """The browser's command; None where there is none."""
    names = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
    return next((path for name in names if (path := shutil.which(name))), None)


class Browser:
    """A running browser with one page."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, session: str) -> None:
        self._socket = socket
        self._session = session
        self._ids = itertools.count(1)
        self._replies: dict[int, asyncio.Future[dict[str, Any]]] = {}
        #: Exceptions, errors on the console (violations of the content security policy are among them), failed loads.
        self.errors: list[str] = []

    async def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Calls a method of the protocol on the page."""
        number = next(self._ids)
        reply = self._replies[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters, "sessionId": self._session})
        async with asyncio.timeout(DEADLINE_S):
            return await reply

    async def read(self) -> None:
        """Takes the browser's messages until the connection ends."""
        async for message in self._socket:
            content = json.loads(message.data)
            if "id" in content:
                reply = self._replies.pop(content["id"], None)
                if reply is None or reply.done():
                    continue
                if "error" in content:
                    reply.set_exception(RuntimeError(str(content["error"])))
                else:
                    reply.set_result(content["result"])
            else:
                self._note(content["method"], content["params"])

    def _note(self, method: str, parameters: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            details = parameters["exceptionDetails"]
            self.errors.append(str(details.get("exception", {}).get("description", details["text"])))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            entry = parameters["entry"]
            self.errors.append(f"{entry['text']} {entry.get('url', '')}")
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "assert"):
            self.errors.append(str([argument.get("value") for argument in parameters["args"]]))

    async def open(self, url: str) -> None:
        """Navigates, and returns once the page's modules have run."""
        result = await self.send("Page.navigate", url=url)
        assert "errorText" not in result, result
        await self.until("document.readyState === 'complete'")

    async def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, which may be a promise."""
        result = await self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    async def until(self, expression: str, *, timeout_s: float = DEADLINE_S) -> Any:
        """The first true value of an expression; fails after the timeout."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while not (value := await self.evaluate(expression)):
            if asyncio.get_running_loop().time() > deadline:
                page = await self.evaluate("document.body.innerText.slice(0, 1500)")
                raise AssertionError(f"never true: {expression}\nerrors: {self.errors}\n{page}")
            await asyncio.sleep(0.05)  # The page sends no notification.
        return value

    async def text(self, selector: str) -> str:
        """The visible text of the first element that matches."""
        return str(await self.until(f"document.querySelector({json.dumps(selector)})?.innerText ?? null"))

    async def click(self, selector: str) -> None:
        """Presses and releases the mouse on the middle of an element."""
        element = f"document.querySelector({json.dumps(selector)})"
        await self.until(f"{element} !== null")
        await self.evaluate(f"{element}.scrollIntoView({{block: 'center'}})")
        box = await self.evaluate(
            f"(b => [b.x + b.width / 2, b.y + b.height / 2, b.width * b.height])({element}.getBoundingClientRect())"
        )
        assert box[2] > 0, f"{selector} is not visible"
        for kind in ("mousePressed", "mouseReleased"):
            await self.send("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    async def press(self, key: str, *, shift: bool = False) -> None:
        """Presses and releases a key."""
        code, text = _KEYS[key]
        named = {"key": " " if key == "Space" else key, "code": key, "windowsVirtualKeyCode": code}
        modifiers = 8 if shift else 0
        await self.send("Input.dispatchKeyEvent", type="keyDown", text=text, modifiers=modifiers, **named)
        await self.send("Input.dispatchKeyEvent", type="keyUp", modifiers=modifiers, **named)

    async def write(self, text: str) -> None:
        """Enters text where the focus is."""
        await self.send("Input.insertText", text=text)

    async def resize(self, width: int, height: int, *, scale: float = 1) -> None:
        """Sets the size of the viewport."""
        await self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=False
        )

    async def prefer(self, **features: str) -> None:
        """Sets media features, such as `prefers_color_scheme="dark"`."""
        named = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        await self.send("Emulation.setEmulatedMedia", features=named)

    async def screenshot(self, path: Path) -> None:
        """Writes a PNG of the viewport."""
        result = await self.send("Page.captureScreenshot", format="png")
        await asyncio.to_thread(path.write_bytes, base64.b64decode(result["data"]))


@asynccontextmanager
async def open_browser(command: str) -> AsyncIterator[Browser]:
    """A browser with an empty profile and one page; it ends with the block."""
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            *(command, *_FLAGS, f"--user-data-dir={profile}", "about:blank"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            async with aiohttp.ClientSession() as http:
                url = await _devtools(Path(profile), process)
                async with http.ws_connect(url, max_msg_size=0) as socket:
                    browser = Browser(socket, await _attach(socket))
                    reader = asyncio.create_task(browser.read(), name="browser")
                    for domain in ("Page", "Runtime", "Log", "Network"):
                        await browser.send(f"{domain}.enable")
                    try:
                        yield browser
                    finally:
                        reader.cancel()
                        await asyncio.gather(reader, return_exceptions=True)
        finally:
            await _end(process)


async def _end(process: asyncio.subprocess.Process) -> None:
    """Ends the browser with all of its processes, which write into the profile until then."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with suppress(TimeoutError):
        async with asyncio.timeout(10):
            await process.wait()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


async def _devtools(profile: Path, process: asyncio.subprocess.Process) -> str:
    """The address of the protocol, which the browser writes into its profile."""
    found = profile / "DevToolsActivePort"
    async with asyncio.timeout(DEADLINE_S):
        while not found.exists() or found.read_text().count("\n") < 1:
            assert process.returncode is None, f"the browser ended with {process.returncode}"
            await asyncio.sleep(0.05)  # The browser sends no notification.
    port, path = found.read_text().split("\n")[:2]
    return f"ws://127.0.0.1:{port}{path}"


async def _attach(socket: aiohttp.ClientWebSocketResponse) -> str:
    """The session of the browser's page."""

    async def call(number: int, method: str, **parameters: Any) -> dict[str, Any]:
        await socket.send_json({"id": number, "method": method, "params": parameters})
        while (content := json.loads((await socket.receive()).data)).get("id") != number:
            pass
        result: dict[str, Any] = content["result"]
        return result

    pages = [target for target in (await call(-1, "Target.getTargets"))["targetInfos"] if target["type"] == "page"]
    attached = await call(-2, "Target.attachToTarget", targetId=pages[0]["targetId"], flatten=True)
    return str(attached["sessionId"])
