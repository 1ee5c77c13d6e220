"""What the processes of a small cluster report about their requests and blocks, read without a pause."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp

from tests.support.cluster import Cluster

#: Whatever a request does takes less.
_NEVER_S = 30.0
_NAMES = {
    "free": "pdserve_kv_blocks_free",
    "total": "pdserve_kv_blocks",
    "reserved": "pdserve_kv_blocks_reserved",
    "running": "pdserve_num_requests_running",
    "waiting": "pdserve_num_requests_waiting",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauges:
    """Requests and reserved blocks that change with a request at once.

    Blocks that running requests hold are left out, since they grow; and the queue of the prefill worker, which reports
    it after each step. A prompt there holds no blocks.
    """

    router_running: float
    router_waiting: float
    decode_waiting: float
    decode_reserved: float


class PhaseMissed(Exception):
    """A request has ended before it reached its phase."""


class Observed:
    """The cluster's workers and router, one of each tier, read over kept connections."""

    def __init__(self, http: aiohttp.ClientSession, cluster: Cluster) -> None:
        self._http = http
        [prefill], [decode] = cluster.workers("prefill"), cluster.workers("decode")
        self._workers = prefill.http_address, decode.http_address
        self.url = cluster.base_url

    async def gauges(self) -> Gauges:
        """The values now."""
        router, decode = await asyncio.gather(self._read(self.url), self._read(f"http://{self._workers[1]}"))
        return Gauges(
            router_running=router["running"],
            router_waiting=router["waiting"],
            decode_waiting=decode["waiting"],
            decode_reserved=decode["reserved"],
        )

    async def is_free(self) -> bool:
        """Whether no worker holds a block or a request."""
        workers = await asyncio.gather(*(self._read(f"http://{address}") for address in self._workers))
        return all(each["free"] == each["total"] and not each["running"] and not each["waiting"] for each in workers)

    async def _read(self, url: str) -> dict[str, float]:
        async with self._http.get(f"{url}/metrics") as response:
            lines = (await response.text()).splitlines()
        return {
            key: next((float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + "{")), 0.0)
            for key, name in _NAMES.items()
        }

    async def until_free(self) -> bool:
        """Whether everything gets free; returns once it is, or can be taken never to be."""
        until = time.perf_counter() + _NEVER_S
        while not (is_free := await self.is_free()) and time.perf_counter() < until:
            pass
        return is_free

    async def comes_to(self, is_reached: Callable[[Gauges], bool]) -> bool:
        """Whether the values get as wanted; returns once they are, or can be taken never to be."""
        until = time.perf_counter() + _NEVER_S
        while not (reached := is_reached(await self.gauges())) and time.perf_counter() < until:
            pass
        return reached

    async def until_state(self, request_id: str, state: str) -> None:
        """Returns once the router's record has this state, or a later one. Raises `PhaseMissed` if it never will."""
        until = time.perf_counter() + _NEVER_S
        while (found := await self.state_of(request_id)) not in (state, "decoding", "finished"):
            if found in ("failed", "cancelled") or time.perf_counter() > until:
                raise PhaseMissed(f"Request {request_id} was to be {state} and is {found}.")

    async def state_of(self, request_id: str) -> str:
        """The request's state, as the router's record has it; empty: unknown."""
        async with self._http.get(f"{self.url}/v1/requests/{request_id}/trace") as response:
            return str((await response.json())["state"]) if response.status == 200 else ""
