"""SIGSTOP of each process in turn while streams run: who notices, what clients get, and that all of it heals."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import psutil
import pytest

from tests.support.cluster import MODEL, Cluster, running_cluster
from tests.support.lazily import openai

pytestmark = pytest.mark.deploy

#: Silence after which the router gives a worker up.
SILENCE_S = 3
#: Silence after which `pdserve up` restarts a process. Longer than a test stops one that is to go on.
HANG_S = 20


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    flags = ("--kv-cache-memory", "256MiB", "--prefill", "2", "--decode", "2", "--hang-timeout-s", str(HANG_S))
    variables = {"PDSERVE_ROUTER__SILENCE_TIMEOUT_S": str(SILENCE_S)}
    with running_cluster(tmp_path_factory.mktemp("stopped"), *flags, **variables) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared: Cluster) -> Iterator[Cluster]:
    """The cluster, with all workers ready and idle before and after each test."""
    shared.wait_tiers(prefill=2, decode=2)
    shared.wait_idle()
    yield shared
    shared.wait_tiers(prefill=2, decode=2)
    shared.wait_idle(timeout_s=120)


class Stream:
    """A streamed completion, and how it ended."""

    def __init__(self, client: openai.AsyncOpenAI, number: int, max_tokens: int) -> None:
        self._client = client
        self._prompt = [number, *((number * 17 + 11 * position) % 40_000 + 100 for position in range(1, 300))]
        self._max_tokens = max_tokens
        self.text = ""
        self.error: openai.APIError | None = None
        self.has_tokens = asyncio.Event()

    async def run(self) -> None:
        """Reads to the end, or to the error."""
        try:
            stream = await self._client.completions.create(
                model=MODEL,
                prompt=self._prompt,
                max_tokens=self._max_tokens,
                temperature=0,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            async for chunk in stream:
                self.text += chunk.choices[0].text
                # The first token is the prefill worker's; this one shows that a decode worker runs.
                if len(self.text) > 20:
                    self.has_tokens.set()
        except openai.APIError as error:
            self.error = error
        finally:
            self.has_tokens.set()


@asynccontextmanager
async def streams(
    cluster: Cluster, first: int, *, count: int = 4, max_tokens: int = 400
) -> AsyncIterator[list[Stream]]:
    """Streams that all have tokens. They have ended when the block is left."""
    async with cluster.async_client() as client, asyncio.TaskGroup() as tasks:
        running = [Stream(client, first + number, max_tokens) for number in range(count)]
        for stream in running:
            tasks.create_task(stream.run())
        for stream in running:
            await stream.has_tokens.wait()
        yield running


async def answers(cluster: Cluster, first: int) -> list[str]:
    """What the streams say when nothing is stopped."""
    async with streams(cluster, first) as undisturbed:
        pass
    assert not any(stream.error for stream in undisturbed)
    return [stream.text for stream in undisturbed]


async def stopped(process: psutil.Process, seconds: float) -> None:
    """Stops a process for a time, which is what the test is about."""
    process.send_signal(signal.SIGSTOP)
    try:
        await asyncio.sleep(seconds)
    finally:
        process.send_signal(signal.SIGCONT)


async def test_streams_of_a_stopped_decode_worker_go_on_with_the_other_one(cluster: Cluster) -> None:
    expected = await answers(cluster, 3000)
    async with streams(cluster, 3000) as running:
        process = cluster.kill("decode-0", signal.SIGSTOP)
        try:
            # Longer than the silence, shorter than the hang that `up` ends: the router alone has noticed.
            await cluster.until_async(
                lambda: [worker.worker_id for worker in cluster.workers("decode")] == ["decode-1"],
                "the router avoids the stopped worker",
            )
            async with streams(cluster, 3100, count=2, max_tokens=40) as later:
                pass
            assert not any(stream.error for stream in later)
            assert process.status() == psutil.STATUS_STOPPED
        finally:
            process.send_signal(signal.SIGCONT)
    assert [stream.error for stream in running] == [None] * len(running)
    assert [stream.text for stream in running] == expected


async def test_a_stopped_prefill_worker_costs_no_request(cluster: Cluster) -> None:
    expected = await answers(cluster, 3200)
    process = cluster.kill("prefill-0", signal.SIGSTOP)
    try:
        async with cluster.async_client() as client, asyncio.TaskGroup() as tasks:
            running = [Stream(client, 3200 + number, 400) for number in range(4)]
            for stream in running:
                tasks.create_task(stream.run())
    finally:
        process.send_signal(signal.SIGCONT)
    assert [stream.text for stream in running] == expected


async def test_a_router_that_was_stopped_for_longer_than_workers_may_be_silent_goes_on_with_its_streams(
    cluster: Cluster,
) -> None:
    expected = await answers(cluster, 3300)
    async with streams(cluster, 3300) as running:
        await stopped(cluster.processes()["router"], 2 * SILENCE_S)
    assert [stream.error for stream in running] == [None] * len(running)
    assert [stream.text for stream in running] == expected


async def test_a_stopped_redis_costs_no_request(cluster: Cluster) -> None:
    process = cluster.kill("redis", signal.SIGSTOP)
    try:
        await cluster.until_async(lambda: not cluster.view().redis.available, "the router notices")
        async with streams(cluster, 3400) as running:
            pass
        assert not any(stream.error for stream in running)
    finally:
        process.send_signal(signal.SIGCONT)
    await cluster.until_async(lambda: cluster.view().redis.available, "Redis is back")


@pytest.mark.parametrize("name", ["decode-1", "prefill-1"])
async def test_a_worker_that_stays_stopped_is_restarted(cluster: Cluster, name: str) -> None:
    process = cluster.kill(name, signal.SIGSTOP)
    await cluster.until_async(
        lambda: cluster.processes().get(name, process) != process, "up restarts it", timeout_s=3 * HANG_S
    )
    await asyncio.to_thread(cluster.wait_tiers, prefill=2, decode=2, timeout_s=120)
    assert any(f"{name}" in line and "no sign of life" in line for line in cluster.lines)
