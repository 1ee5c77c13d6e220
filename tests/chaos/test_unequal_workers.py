"""A stream whose worker is lost while only one with another instruction set is left: real processes, `kill -9`.

It starts a cluster of its own for each setting, so only the full depth (`PDSERVE_TEST_DEPTH=full`) runs it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kernels.choice import instruction_sets
from pdserve.cli.free_ports import free_port
from pdserve.cli.private_redis import PrivateRedis
from pdserve.model.resolve import resolve_model
from tests.support.cluster import MODEL
from tests.support.depth import IS_FULL
from tests.support.services import Events, RouterClient, decode_workers, service

SETS = instruction_sets()

pytestmark = [
    pytest.mark.skipif(not IS_FULL, reason="starts six processes: `make test-all ARGS=chaos` runs it"),
    pytest.mark.skipif(len(SETS) < 2, reason="this machine runs fewer than two instruction sets"),
    pytest.mark.timeout(240),
]

_MAX_TOKENS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Unequal:
    """A router, and a decode worker for each of two instruction sets."""

    router: RouterClient
    workers: dict[str, asyncio.subprocess.Process]

    async def stream(self, *, kills: bool) -> tuple[Events, dict[str, Any]]:
        """The events of a stream, and its decision record. With `kills`, its worker is lost on the way."""

        async def kill(request_id: str) -> None:
            [name] = decode_workers(await self.router.record(request_id))
            self.workers[name].kill()

        events = await self.router.stream(
            meanwhile=kill if kills else None, prompt="Once upon a time", max_tokens=_MAX_TOKENS
        )
        return events, await self.router.record(events[0]["id"])


@asynccontextmanager
async def unequal(directory: Path, on_change: str) -> AsyncIterator[Unequal]:
    model, port = resolve_model(MODEL).path, free_port()
    async with AsyncExitStack() as stack:
        redis = await stack.enter_async_context(PrivateRedis())
        shared = {"model": model, "redis_url": redis.url, "host": "127.0.0.1"}
        await stack.enter_async_context(
            service(
                directory / "router.log",
                "router_svc",
                **shared,
                port=port,
                prefill_expected=0,
                on_numerics_change=on_change,
                worker_return_timeout_s=8,
            )
        )
        workers = {
            name: await stack.enter_async_context(
                service(
                    directory / f"{name}.log",
                    "decode_svc",
                    **shared,
                    worker_id=name,
                    instruction_set=name,
                    threads=1,
                    kv_cache_memory="128MiB",
                )
            )
            for name in (SETS[0], SETS[-1])
        }
        http = await stack.enter_async_context(aiohttp.ClientSession())
        cluster = Unequal(router=RouterClient(http, f"http://127.0.0.1:{port}"), workers=workers)
        await cluster.router.until_ready(*workers)
        yield cluster


async def test_a_stream_goes_on_in_another_class_and_everyone_can_see_it(tmp_path: Path) -> None:
    async with unequal(tmp_path, "continue") as cluster:
        events, record = await cluster.stream(kills=True)
        assert sum(len(event["choices"]) for event in events) >= _MAX_TOKENS
        assert record["state"] == "finished"
        assert record["outcome"]["completion_tokens"] == _MAX_TOKENS
        first, second = (each for each in record["decisions"] if each["tier"] == "decode")
        assert first["worker"] != second["worker"]
        assert f"cpu/{first['worker']}/" in second["why"]
        assert await cluster.router.metric("pdserve_numerics_changes_total") == 1


async def test_a_stream_ends_with_a_clear_error_where_no_worker_computes_the_same(tmp_path: Path) -> None:
    async with unequal(tmp_path, "error") as cluster:
        events, record = await cluster.stream(kills=True)
        assert record["state"] == "failed"
        message = events[-1]["error"]["message"]
        assert "would compute other bits" in message
        assert "--instruction-set" in message
        assert await cluster.router.metric("pdserve_numerics_changes_total") == 0
        # The worker that is left serves what is new.
        assert (await cluster.stream(kills=False))[1]["state"] == "finished"
