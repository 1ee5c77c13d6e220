"""Hosts that are cut apart while requests run: real processes, one host each, and no error on any connection.

The hosts are network namespaces, which only root can make: `make test-deploy` runs these tests where it can.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from pdserve.cli.private_redis import find_redis_server, server_argv, wait_until_ready
from tests.support.default_model import model_for_depth
from tests.support.hosts import Hosts, hosts
from tests.support.own_task import in_own_task
from tests.support.redis import eventually
from tests.support.services import Events, RouterClient, decode_workers, service, text_of

pytestmark = pytest.mark.deploy

_PORT = 8000
#: Seconds of silence after which a worker counts as lost, and of a lease: less than usual, so that tests end soon.
_SILENCE_S, _LEASE_S = 3, 5
_MAX_TOKENS = 400
_WORKERS = {"prefill-0": "prefill", "decode-near": "decode", "decode-far": "decode"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Divided:
    """Router and Redis on one host, and each worker on its own, named like the worker."""

    router: RouterClient
    hosts: Hosts

    async def stream(self, prompt: list[int], **fields: Any) -> tuple[Events, dict[str, Any]]:
        """The events of a stream, and its decision record."""
        events = await self.router.stream(prompt=prompt, max_tokens=_MAX_TOKENS, **fields)
        return events, await self.router.record(events[0]["id"])


@asynccontextmanager
async def _redis(address: str, directory: Path) -> AsyncIterator[str]:
    argv = server_argv(find_redis_server(), directory=directory, port=6379)
    # The private Redis of `pdserve up` is for its host alone.
    argv[argv.index("--bind") + 1] = address
    process = await asyncio.create_subprocess_exec(*argv, "--protected-mode", "no", stdout=asyncio.subprocess.DEVNULL)
    try:
        url = f"redis://{address}:6379"
        await wait_until_ready(url, has_ended=lambda: process.returncode is not None)
        yield url
    finally:
        process.terminate()
        await process.wait()


@asynccontextmanager
async def divided(directory: Path) -> AsyncIterator[Divided]:
    model = model_for_depth(directory)
    async with AsyncExitStack() as stack:
        made = stack.enter_context(hosts("router", *_WORKERS))
        stack.enter_context(made.on("router"))
        redis_url = await stack.enter_async_context(_redis(made.address("router"), directory))
        shared = {"model": model, "redis_url": redis_url}
        limits = {"silence_timeout_s": _SILENCE_S, "local_prefill_threshold": 0, "prefill_expected": 1}
        await stack.enter_async_context(
            service(
                *(directory / "router.log", "router_svc"), host=made.address("router"), port=_PORT, **shared, **limits
            )
        )
        for name, tier in _WORKERS.items():
            flags = {"threads": 1, "kv_cache_memory": "128MiB", **({"lease_s": _LEASE_S} if tier == "decode" else {})}
            await stack.enter_async_context(
                service(
                    *(directory / f"{name}.log", f"{tier}_svc"),
                    prefix=made.command(name),
                    environment={"UCX_TLS": "tcp,self"},  # Blocks of other hosts cannot be read from memory.
                    **{"worker_id": name, "host": made.address(name), **shared, **flags},
                )
            )
        http = await stack.enter_async_context(aiohttp.ClientSession())
        cluster = Divided(router=RouterClient(http, f"http://{made.address('router')}:{_PORT}"), hosts=made)
        await cluster.router.until_ready(*_WORKERS)
        yield cluster


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Divided]:
    """The hosts with their processes. After each test, all workers are ready and hold nothing."""
    async with in_own_task(divided(tmp_path)) as opened:
        yield opened
        await opened.router.until_ready(*_WORKERS)
        await opened.router.until_idle(*_WORKERS)


def prompt(length: int) -> list[int]:
    """Token ids that no other prompt begins with."""
    rng = random.Random(length)
    return [rng.randrange(100, 40_000) for _ in range(length)]


@pytest.mark.parametrize("direction", ["both", "to the worker", "from the worker"])
async def test_a_stream_goes_on_when_its_decode_worker_is_cut_off(cluster: Divided, direction: str) -> None:
    undisturbed, _ = await cluster.stream(prompt(400), cache_salt="undisturbed")
    with ExitStack() as stack:

        async def cut_off(request_id: str) -> None:
            [worker] = decode_workers(await cluster.router.record(request_id))
            for other in {"router", *_WORKERS} - {worker}:
                ways = {"to the worker": [(other, worker)], "from the worker": [(worker, other)]}
                stack.enter_context(cluster.hosts.cut(*ways.get(direction, [(other, worker), (worker, other)])))

        events, record = await cluster.stream(prompt(400), cache_salt="disturbed", meanwhile=cut_off)
    assert text_of(events) == text_of(undisturbed)
    first, second = decode_workers(record)
    assert first != second
    assert [each["reason"] for each in record["retries"]] == ["transfer_timeout"]
    [pause] = record["pauses"]
    assert pause["seconds"] > _SILENCE_S


async def test_a_prompt_is_computed_elsewhere_when_its_prefill_worker_is_cut_off(cluster: Divided) -> None:
    undisturbed, _ = await cluster.stream(prompt(6000), cache_salt="undisturbed")

    async def is_computed() -> bool:
        return bool((await cluster.router.record("cut-off")).get("chunks"))

    async with asyncio.TaskGroup() as tasks:
        headers = {"X-Request-Id": "cut-off"}
        stream = tasks.create_task(cluster.stream(prompt(6000), cache_salt="disturbed", headers=headers))
        await eventually(is_computed)
        others = {"router", *_WORKERS} - {"prefill-0"}
        with cluster.hosts.cut(*((a, b) for other in others for a, b in ((other, "prefill-0"), ("prefill-0", other)))):
            events, record = await stream
    assert text_of(events) == text_of(undisturbed)
    assert record["prefilled_by"] == "decode"
    assert len(decode_workers(record)) == 1


async def test_between_tiers_that_cannot_reach_each_other_requests_are_served_and_then_handed_over_again(
    cluster: Divided,
) -> None:
    undisturbed, record = await cluster.stream(prompt(400), cache_salt="undisturbed")
    assert record["prefilled_by"] == "prefill"
    decode = ("decode-near", "decode-far")
    with cluster.hosts.cut(*((a, b) for name in decode for a, b in ((name, "prefill-0"), ("prefill-0", name)))):
        events, record = await cluster.stream(prompt(400), cache_salt="disturbed")
        assert text_of(events) == text_of(undisturbed)
        assert record["prefilled_by"] == "decode"
        await cluster.router.until_idle(*_WORKERS)

    async def is_handed_over() -> bool:
        """Connections that were cut send again what was lost, at growing intervals."""
        events, record = await cluster.stream(prompt(400), cache_salt=f"healed-{next(numbers)}")
        assert text_of(events) == text_of(undisturbed)
        return bool(record["prefilled_by"] == "prefill")

    numbers = itertools.count()
    await eventually(is_handed_over)
