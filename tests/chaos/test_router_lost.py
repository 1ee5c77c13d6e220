"""kill -9 of a router with open requests: clients resume at another one, and workers free what it had."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import subprocess
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.chaos.test_worker_lost import CALLING
from tests.support.answers import OPEN_THINKING
from tests.support.cluster import MODEL, READY_S, Cluster, free_port
from tests.support.depth import IS_FULL
from tests.support.prefill_gate import PrefillGate

pytestmark = [
    pytest.mark.skipif(not IS_FULL, reason="starts another router: `make test-all ARGS=chaos` runs it"),
]

#: Everything that decides about later tokens by earlier ones.
FIELDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.9, "seed": 3, "n": 3},
    {"temperature": 1.0, "seed": 4, "frequency_penalty": 0.6, "presence_penalty": 0.3, "logprobs": 2},
    {"temperature": 0.8, "seed": 5, "repetition_penalty": 1.2, "min_tokens": 30, "top_k": 30, "stop": [" the ", "."]},
    {"temperature": 0.9, "seed": 8, "n": 2, **CALLING},
    {
        "temperature": 0.8,
        "seed": 9,
        **CALLING,
        "chat_template": OPEN_THINKING,
        "thinking_token_budget": 25,
    },
]
EVENT = re.compile(rb"id: (?P<id>[^\n]+)\ndata: (?P<data>[^\n]+)\n\n")


def body_of(number: int, first: int) -> dict[str, Any]:
    body = {"model": MODEL, "max_tokens": 60, "stream": True, "ignore_eos": True} | FIELDS[number]
    if "messages" not in body:
        body["prompt"] = [first, *((first * 17 + 11 * position) % 40_000 + 100 for position in range(1, 100))]
    return body | {"stream_options": {"include_usage": True}}


def path_of(body: dict[str, Any]) -> str:
    """The endpoint that takes it."""
    return "/v1/chat/completions" if "messages" in body else "/v1/completions"


async def start_router(cluster: Cluster, directory: Path, port: int) -> asyncio.subprocess.Process:
    """Starts another router of the cluster like the first one. Its gRPC port is the next one."""
    first = cluster.processes()["router"]
    given, command = {"--port": str(port), "--grpc-port": str(port + 1)}, []
    for word in first.cmdline():
        name = word.partition("=")[0]
        command.append(f"{name}={given[name]}" if name in given else word)
    environment = {name: value for name, value in first.environ().items() if name != "NOTIFY_SOCKET"}
    with (directory / "another-router.log").open("ab") as log:
        return await asyncio.create_subprocess_exec(
            *command, env=os.environ | environment, stdout=log, stderr=subprocess.STDOUT
        )


@asynccontextmanager
async def another_router(cluster: Cluster, directory: Path) -> AsyncIterator[str]:
    """The URL of a second router of the cluster."""
    port = free_port()
    process = await start_router(cluster, directory, port)
    url = f"http://127.0.0.1:{port}"
    try:
        await cluster.until_async(lambda: is_ready(url), "the other router is ready", timeout_s=READY_S)
        yield url
    finally:
        process.terminate()
        await process.wait()


def is_ready(url: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/readyz", timeout=10) as response:
        return bool(response.status == 200)
    return False


def by_choice(data: bytes) -> tuple[dict[int, list[Any]], list[Any]]:
    """The events of each choice, and the usage in the end, without ids and the time of the response."""
    choices: dict[int, list[Any]] = {}
    usage: list[Any] = []
    assert EVENT.sub(b"", data) == b""
    *events, last = [match["data"] for match in EVENT.finditer(data)]
    assert last == b"[DONE]"
    for each in map(json.loads, events):
        usage += [each["usage"]] if each["usage"] else []
        for choice in each["choices"]:
            for call in choice.get("delta", {}).get("tool_calls", ()):
                call.pop("id", None)
            choices.setdefault(choice["index"], []).append(choice)
    return choices, usage


async def whole(http: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> bytes:
    async with http.post(url + path_of(body), json=body) as response:
        assert response.status == 200, await response.text()
        return await response.read()


class Reader:
    """A client that keeps what it gets, and goes on where it was."""

    def __init__(self, http: aiohttp.ClientSession, body: dict[str, Any]) -> None:
        self._http = http
        self._body = body
        self._data = b""
        self.id = ""
        self.has_some = asyncio.Event()

    async def read(self, url: str, num_events: int) -> None:
        """Reads until the connection breaks. Sets `has_some` after `num_events`."""
        async with self._http.post(url + path_of(self._body), json=self._body) as response:
            assert response.status == 200, await response.text()
            self.id = response.headers["X-Request-Id"]
            with pytest.raises(aiohttp.ClientError):
                async for chunk in response.content.iter_any():
                    self._data += chunk
                    if len(EVENT.findall(self._data)) >= num_events:
                        self.has_some.set()

    async def resume(self, url: str) -> bytes:
        """The whole stream, of which the rest comes from this router."""
        events = list(EVENT.finditer(self._data))
        headers = {"Last-Event-ID": events[-1]["id"].decode()}
        async with self._http.get(f"{url}/v1/requests/{self.id}/stream", headers=headers) as response:
            assert response.status == 200, await response.text()
            return self._data[: events[-1].end()] + await response.read()


async def test_streams_of_a_killed_router_go_on_at_another_one_with_the_same_bytes(
    fragile: Cluster, tmp_path: Path
) -> None:
    bodies = [body_of(number, 2600 + number) for number in range(len(FIELDS))]
    async with another_router(fragile, tmp_path) as other, aiohttp.ClientSession() as http:
        undisturbed = [await whole(http, other, body) for body in bodies]
        # Their cached prompts must be those of the runs to come.
        undisturbed = [await whole(http, other, body) for body in bodies]
        readers = [Reader(http, body) for body in bodies]
        async with asyncio.TaskGroup() as tasks:
            for number, reader in enumerate(readers):
                tasks.create_task(reader.read(fragile.base_url, 6 + 3 * number))
            for reader in readers:
                await reader.has_some.wait()
            fragile.kill("router")
        joined = await asyncio.gather(*(reader.resume(other) for reader in readers))
        for mine, theirs in zip(joined, undisturbed, strict=True):
            assert by_choice(mine) == by_choice(theirs)
        # And once more at the router that has been restarted, from Redis alone.
        await fragile.until_async(lambda: is_ready(fragile.base_url), "the router is back", timeout_s=READY_S)
        assert [await reader.resume(fragile.base_url) for reader in readers] == joined


async def test_workers_free_what_a_killed_router_had_reserved(
    fragile: Cluster, prefill_gate: PrefillGate, tmp_path: Path
) -> None:
    """While the prompt can still not be computed: nothing but the lost router can have freed the blocks."""
    async with another_router(fragile, tmp_path) as other, aiohttp.ClientSession() as http:
        workers = {worker.worker_id: worker.http_address for worker in fragile.view().workers}

        def are_free() -> bool:
            return all(
                fragile.metric(address, "pdserve_kv_blocks_free") == fragile.metric(address, "pdserve_kv_blocks")
                and fragile.metric(address, "pdserve_num_requests_running") == 0
                and fragile.metric(address, "pdserve_num_requests_waiting") == 0
                for address in workers.values()
            )

        body = body_of(0, 2700) | {"prompt": [2700 + position % 900 for position in range(1600)]}
        reader = asyncio.create_task(Reader(http, body).read(fragile.base_url, 1))
        with prefill_gate.closed():
            await fragile.until_async(
                lambda: any(worker.running for worker in fragile.workers("prefill")), "a prefill worker computes"
            )
            assert not await asyncio.to_thread(are_free)
            fragile.kill("router")
            with pytest.raises(aiohttp.ClientError):
                await reader
            await fragile.until_async(are_free, "the workers have freed the blocks")
        assert await whole(http, other, body)
