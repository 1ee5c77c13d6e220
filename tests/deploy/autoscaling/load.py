"""Load steps for a cluster: clients that always have one request open, and arrivals at a steady rate."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

import aiohttp

from pdserve.base.tasks import service_group

#: Ids of ordinary tokens of the default model.
_TOKEN_IDS = (1000, 40_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One kind of load. Prompts have random tokens, so that none is cached."""

    name: str
    seconds: float
    prompt_tokens: int = 0
    max_tokens: int = 0
    #: Requests that are always open.
    clients: int = 0
    #: Seconds between two arrivals, whatever happens to the requests.
    interval_s: float = 0.0


class LoadDriver:
    """Runs steps against one router and counts the answers by status."""

    def __init__(self, base_url: str, model: str, *, seed: int = 1) -> None:
        self._url = f"{base_url}/v1/completions"
        self._model = model
        self._random = random.Random(seed)
        self.statuses: dict[int, int] = {}

    async def run(self, step: Step) -> None:
        """Returns when the time is over; requests that are still open are cancelled, as by clients that leave."""
        limit = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=limit, timeout=aiohttp.ClientTimeout(total=600)) as http:
            try:
                async with asyncio.timeout(step.seconds), service_group() as group:
                    for number in range(step.clients):
                        group.start(self._repeat(http, step), name=f"client {number}")
                    for number in self._arrivals(step):
                        group.start(self._request(http, step), name=f"arrival {number}")
                        await asyncio.sleep(step.interval_s)
                    await asyncio.Event().wait()
            except TimeoutError:
                pass

    async def complete(self, *, prompt_tokens: int, max_tokens: int) -> None:
        """One request, to its end."""
        step = Step(name="one", seconds=0, prompt_tokens=prompt_tokens, max_tokens=max_tokens)
        async with aiohttp.ClientSession() as http:
            await self._request(http, step)

    @staticmethod
    def _arrivals(step: Step) -> Iterator[int]:
        return itertools.count() if step.interval_s else iter(())

    async def _repeat(self, http: aiohttp.ClientSession, step: Step) -> None:
        while True:
            await self._request(http, step)

    async def _request(self, http: aiohttp.ClientSession, step: Step) -> None:
        body = {
            "model": self._model,
            "prompt": [self._random.randrange(*_TOKEN_IDS) for _ in range(step.prompt_tokens)],
            "max_tokens": step.max_tokens,
            "ignore_eos": True,
        }
        async with http.post(self._url, json=body) as response:
            await response.read()
            self.statuses[response.status] = self.statuses.get(response.status, 0) + 1
