"""Streams survive readers of every kind, whatever characters the model writes."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import socket
import subprocess
import urllib.request
from collections.abc import Callable, Iterable
from typing import Any

import httpx
import pytest

from tests.integration.router_svc.conftest import ScriptedCluster
from tests.support.tiny_model import END, NAME

#: Everything at which some reader ends a line, and characters of two, three and four bytes.
TEXT = "1\u20282\u20293\x854\x0b5\x0c6\x1c7\x1d8\x1e9\r\n10\r11\n12é13ℵ14😀"
USER = {"role": "user", "content": "x"}


def _completion(event: Any) -> str:
    return "".join(choice["text"] for choice in event["choices"])


def _chat(event: Any) -> str:
    return "".join(choice["delta"].get("content") or "" for choice in event["choices"])


def _message(event: Any) -> str:
    return event.get("delta", {}).get("text", "")


def _response(event: Any) -> str:
    return event["delta"] if event["type"] == "response.output_text.delta" else ""


def _ollama(event: Any) -> str:
    return event["message"]["content"]


#: Path, fields, and the text of an event.
APIS: dict[str, tuple[dict[str, Any], Callable[[Any], str]]] = {
    "/v1/completions": ({"prompt": "x", "max_tokens": 64}, _completion),
    "/v1/chat/completions": ({"messages": [USER]}, _chat),
    "/v1/messages": ({"messages": [USER], "max_tokens": 64}, _message),
    "/v1/responses": ({"input": "x", "store": False}, _response),
    "/api/chat": ({"messages": [USER]}, _ollama),
}


def _with_httpx(url: str, body: dict[str, Any]) -> Iterable[str]:
    with httpx.stream("POST", url, json=body, timeout=60) as response:
        return [*response.iter_lines()]


def _with_requests(url: str, body: dict[str, Any]) -> Iterable[str]:
    requests: Any = pytest.importorskip("requests")
    response = requests.post(url, json=body, stream=True, timeout=60)
    response.encoding = "utf-8"
    return [*response.iter_lines(decode_unicode=True)]


def _with_splitlines(url: str, body: dict[str, Any]) -> Iterable[str]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        text: str = response.read().decode()
    return text.splitlines()


def _with_the_html_standard(url: str, body: dict[str, Any]) -> Iterable[str]:
    """As EventSource splits lines."""
    return re.split("\r\n|\n|\r", _read(url, body, "HTTP/1.1", "Connection: close\r\n", decode_chunks=True))


def _with_http_1_0(url: str, body: dict[str, Any]) -> Iterable[str]:
    """As old proxies ask: the end of the connection is the end of the body."""
    return _read(url, body, "HTTP/1.0", "", decode_chunks=False).splitlines()


def _read(url: str, body: dict[str, Any], version: str, headers: str, *, decode_chunks: bool) -> str:
    parsed = httpx.URL(url)
    sent = json.dumps(body).encode()
    head = f"POST {parsed.path} {version}\r\nHost: localhost\r\n{headers}Content-Type: application/json\r\n"
    with socket.create_connection((parsed.host, parsed.port), timeout=60) as connection:
        connection.sendall(f"{head}Content-Length: {len(sent)}\r\n\r\n".encode() + sent)
        received = b"".join(iter(lambda: connection.recv(1), b""))
    status, _, content = received.partition(b"\r\n\r\n")
    assert status.split()[1] == b"200"
    assert (b"chunked" in status.lower()) == decode_chunks
    whole = b""
    while decode_chunks and content:
        size, _, rest = content.partition(b"\r\n")
        length = int(size, 16)
        whole, content = whole + rest[:length], rest[length + 2 :] if length else b""
    return (whole or content).decode()


def _with_curl(url: str, body: dict[str, Any]) -> Iterable[str]:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    command = ["curl", "-sN", "--max-time", "60", url, "-H", "Content-Type: application/json", "-d", json.dumps(body)]
    return subprocess.run(command, check=True, capture_output=True).stdout.decode().splitlines()


async def test_the_clients_of_openai_get_it_too(cluster: ScriptedCluster) -> None:
    cluster.script.replies = [[*TEXT.encode(), END]]
    async with cluster.client() as client:
        texts = await client.completions.create(model=NAME, prompt="x", max_tokens=64, stream=True)
        assert "".join([chunk.choices[0].text async for chunk in texts]) == TEXT
        chat: Any = await client.chat.completions.create(model=NAME, messages=[USER], stream=True)  # type: ignore[list-item]
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in chat]) == TEXT
        # What the client has sent comes back in the events of a response.
        events: Any = await client.responses.create(model=NAME, input="x", instructions=TEXT, store=False, stream=True)
        responses = [event.response async for event in events if hasattr(event, "response")]
    assert {response.instructions for response in responses} == {TEXT}
    assert responses[-1].output_text == TEXT


READERS = [_with_httpx, _with_requests, _with_splitlines, _with_the_html_standard, _with_http_1_0, _with_curl]


@pytest.mark.parametrize("read", READERS, ids=lambda read: read.__name__.removeprefix("_with_"))
async def test_every_reader_gets_the_text_that_the_model_has_written(
    cluster: ScriptedCluster, read: Callable[[str, dict[str, Any]], Iterable[str]]
) -> None:
    cluster.script.replies = [[*TEXT.encode(), END]]
    for path, (fields, text_of) in APIS.items():
        body = {"model": NAME, "stream": True, **fields}
        lines = await asyncio.to_thread(read, cluster.base_url + path, body)
        is_events = path != "/api/chat"
        # Every line is one of a stream, or empty: none is the rest of another.
        known = ("data: ", "event: ") if is_events else ("{",)
        assert all(line.startswith(known) for line in lines if line), (path, lines)
        data = [line.removeprefix("data: ") for line in lines if line and not line.startswith("event: ")]
        events = [json.loads(each) for each in data if each != "[DONE]"]
        assert "".join(map(text_of, events)) == TEXT, path
