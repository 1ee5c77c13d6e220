"""Routers and workers that a test starts one by one, each on a host and with an environment of its own."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp

from tests.support.redis import eventually

READY_S = 90.0

Events = list[dict[str, Any]]


@asynccontextmanager
async def service(
    log: Path, module: str, *, prefix: Sequence[str] = (), environment: Mapping[str, str] | None = None, **flags: object
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process of one service, killed at the end. `prefix`: words in front of its command."""
    words = [word for name, value in flags.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    with log.open("wb") as output:
        started = await asyncio.create_subprocess_exec(
            *(*prefix, sys.executable, "-m", module, *words),
            env={**os.environ, **(environment or {})},
            stdout=output,
            stderr=output,
        )
    try:
        yield started
    finally:
        if started.returncode is None:
            started.kill()
        await started.wait()


class RouterClient:
    """A cluster as clients of one of its routers see it."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self.http = http
        self.url = url

    async def get(self, path: str) -> Any:
        """JSON of a GET request."""
        async with self.http.get(self.url + path) as response:
            return await response.json()

    async def record(self, request_id: str) -> Any:
        """The decision record of a request."""
        return await self.get(f"/v1/requests/{request_id}/trace")

    async def workers(self) -> dict[str, dict[str, Any]]:
        """The ready workers by id; none while the router does not answer."""
        with suppress(aiohttp.ClientConnectionError):
            found = (await self.get("/v1/cluster"))["workers"]
            return {worker["worker_id"]: worker for worker in found if worker["ready"]}
        return {}

    async def metric(self, name: str, url: str = "") -> float:
        """Sum of a metric's samples, of the router or the process at `url`."""
        async with self.http.get(f"{url or self.url}/metrics") as response:
            lines = (await response.text()).splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    async def until_ready(self, *names: str) -> None:
        """Returns once exactly these workers are ready."""

        async def are_ready() -> bool:
            return (await self.workers()).keys() == set(names)

        await eventually(are_ready, timeout_s=READY_S)

    async def until_idle(self, *names: str) -> None:
        """Returns once these workers hold nothing: all blocks are free, and no transfer or request is left."""

        async def are_idle() -> bool:
            workers = await self.workers()
            return workers.keys() >= set(names) and all([await self._is_idle(workers[name]) for name in names])

        await eventually(are_idle, timeout_s=READY_S)

    async def _is_idle(self, worker: Mapping[str, Any]) -> bool:
        url = f"http://{worker['http_address']}"
        held = ("pdserve_kv_transfers_active", "pdserve_num_requests_running", "pdserve_num_requests_waiting")
        free, total = [await self.metric(f"pdserve_kv_blocks{name}{{", url) for name in ("_free", "")]
        return free == total and not any([await self.metric(name, url) for name in held])

    async def stream(
        self,
        *,
        meanwhile: Callable[[str], Awaitable[None]] | None = None,
        headers: Mapping[str, str] | None = None,
        **fields: object,
    ) -> Events:
        """The events of a streamed completion. `meanwhile` runs once 20 have come, with the request's id."""
        [model] = (await self.get("/v1/models"))["data"]
        body = {"model": model["id"], "temperature": 0, "stream": True, "ignore_eos": True, **fields}
        events: Events = []
        async with self.http.post(f"{self.url}/v1/completions", json=body, headers=headers) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                if line.startswith(b"data: {"):
                    events.append(json.loads(line[6:]))
                if meanwhile is not None and len(events) == 20:
                    run, meanwhile = meanwhile, None
                    await run(events[0]["id"])
        return events


def text_of(events: Events) -> str:
    """The text of a streamed completion with one choice."""
    return "".join(choice["text"] for event in events for choice in event["choices"])


def decode_workers(record: Mapping[str, Any]) -> list[str]:
    """The decode workers that a request was given to, in order."""
    return [each["worker"] for each in record["decisions"] if each["tier"] == "decode"]
