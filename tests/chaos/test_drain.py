"""SIGTERM at workers under load: requests move, and streams are those of an undisturbed run."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator

import pytest

from pdserve.cli.__main__ import main
from tests.chaos.test_worker_lost import BODIES, choices_of, streams_until
from tests.support.cluster import READY_S, Cluster, running_cluster
from tests.support.default_model import EXACT_DTYPE
from tests.support.depth import IS_FULL

#: Long enough for workers to be restarted meanwhile.
MAX_TOKENS = 700 if IS_FULL else 300
RESTARTED = ("decode-0", "prefill-0", "decode-1", "prefill-1") if IS_FULL else ("decode-0",)
STREAMS = (*range(len(BODIES)),) if IS_FULL else (0, 1, len(BODIES) - 1)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory, model: str) -> Iterator[Cluster]:
    """Two workers of each tier."""
    flags = ("--dtype", EXACT_DTYPE, "--kv-cache-memory", "256MiB", "--prefill", "2", "--decode", "2")
    flags += ("--trust-request-chat-template",)
    flags += ("--drain-timeout-s", "1")  # No stream ends in time: all have to move.
    with running_cluster(tmp_path_factory.mktemp("pairs"), *flags, model=model) as cluster:
        yield cluster


async def restarted(cluster: Cluster, name: str, *, or_else: Callable[[], bool] = lambda: False) -> None:
    """Sends SIGTERM to a worker, and returns when its next incarnation is ready or something else has happened."""
    [epoch] = [worker.epoch for worker in cluster.view().workers if worker.worker_id == name]
    cluster.kill(name, signal.SIGTERM)

    def is_back() -> bool:
        workers = [worker for worker in cluster.view().workers if worker.worker_id == name]
        return or_else() or any(worker.ready and worker.epoch != epoch for worker in workers)

    await cluster.until_async(is_back, f"{name} is back", timeout_s=READY_S)


async def test_a_rolling_restart_of_workers_loses_no_token(pairs: Cluster) -> None:
    """Streams run all the time. Fails when a request waits for a worker's end, or is computed as another one."""
    router = f"127.0.0.1:{pairs.port}"

    def has_moved() -> bool:
        """Then streams need not go on until the worker is back, except at full depth."""
        return not IS_FULL and pairs.metric(router, "pdserve_migrations_total", reason="drain", outcome="moved") > 0

    async with pairs.async_client() as client:
        answers = await asyncio.gather(*(choices_of(client, number, max_tokens=MAX_TOKENS) for number in STREAMS))
        is_over = asyncio.Event()

        async with asyncio.TaskGroup() as tasks:
            streams = [
                tasks.create_task(streams_until(is_over, client, number, undisturbed, max_tokens=MAX_TOKENS))
                for number, undisturbed in zip(STREAMS, answers, strict=True)
            ]
            for name in RESTARTED:
                await restarted(pairs, name, or_else=has_moved)
            is_over.set()
        assert all(stream.result() > 0 for stream in streams)
    assert pairs.metric(router, "pdserve_request_outcomes_total", outcome="failed") == 0
    pairs.wait_tiers(prefill=2, decode=2, timeout_s=READY_S)
    pairs.wait_idle()


@pytest.mark.skipif(not IS_FULL, reason="takes a minute: `make test-all ARGS=chaos` runs it")
async def test_a_worker_drained_by_hand_is_left_and_taken_back(pairs: Cluster) -> None:
    """Fails when a stream stays on the drained worker, breaks, or changes, or when it gets no requests again."""
    router, names = f"127.0.0.1:{pairs.port}", ("decode-0", "decode-1")

    def moved() -> float:
        return pairs.metric(router, "pdserve_migrations_total", reason="drain", outcome="moved")

    def running(name: str) -> int:
        return next(worker.running for worker in pairs.view().workers if worker.worker_id == name)

    async def drained(*arguments: str) -> None:
        assert await asyncio.to_thread(main, ["drain", *arguments, "--base-url", pairs.base_url]) == 0

    async with pairs.async_client() as client:
        undisturbed = [await choices_of(client, number, max_tokens=MAX_TOKENS) for number in STREAMS]
        before = moved()
        async with asyncio.TaskGroup() as tasks:
            streams = [tasks.create_task(choices_of(client, number, max_tokens=MAX_TOKENS)) for number in STREAMS]
            await pairs.until_async(lambda: all(map(running, names)), "both workers run requests")
            await drained("decode-0")
            assert [each.ready for each in pairs.view().workers if each.worker_id in names] == [False, True]
            # Drained again, it still is; the last one is not drained by mistake.
            await drained("decode-0", "--no-wait")
            assert await asyncio.to_thread(main, ["drain", "decode-1", "--base-url", pairs.base_url]) == 1
        assert [stream.result() for stream in streams] == undisturbed
        assert moved() > before
        await drained("decode-0", "--undo")
        pairs.wait_tiers(prefill=2, decode=2)
        async with asyncio.TaskGroup() as tasks:
            for number in STREAMS:
                tasks.create_task(choices_of(client, number, max_tokens=MAX_TOKENS))
            await pairs.until_async(lambda: running("decode-0") > 0, "the worker runs requests again")
    pairs.wait_idle()


@pytest.mark.skipif(not IS_FULL, reason="takes half a minute: `make test-all ARGS=chaos` runs it")
async def test_requests_are_spread_evenly_by_hand(pairs: Cluster) -> None:
    """All streams run on one worker, since the other one was drained when they came. Fails when none moves back."""
    router = f"127.0.0.1:{pairs.port}"

    async def ran(*arguments: str) -> None:
        assert await asyncio.to_thread(main, [*arguments, "--base-url", pairs.base_url]) == 0

    def moved() -> float:
        return pairs.metric(router, "pdserve_migrations_total", reason="rebalance", outcome="moved")

    async with pairs.async_client() as client:
        undisturbed = await asyncio.gather(*(choices_of(client, number, max_tokens=MAX_TOKENS) for number in STREAMS))
        await ran("drain", "decode-0")
        async with asyncio.TaskGroup() as tasks:
            streams = [tasks.create_task(choices_of(client, number, max_tokens=MAX_TOKENS)) for number in STREAMS]
            await pairs.until_async(
                lambda: sum(each.running for each in pairs.workers("decode")) >= len(STREAMS), "all streams run"
            )
            await ran("drain", "decode-0", "--undo")
            pairs.wait_tiers(prefill=2, decode=2)
            await ran("rebalance")
            assert moved() > 0
        assert [stream.result() for stream in streams] == undisturbed
    pairs.wait_idle()
