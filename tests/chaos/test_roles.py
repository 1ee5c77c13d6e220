"""Workers change their roles under load: streams are those of an undisturbed run, and either tier may be lost."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pdserve.cli.__main__ import main
from pdserve.cli.status import RouterStatus
from tests.chaos.test_worker_lost import BODIES, choices_of, streams_until
from tests.support.cluster import READY_S, Cluster, running_cluster
from tests.support.depth import IS_FULL

pytestmark = [
    pytest.mark.skipif(not IS_FULL, reason="takes half a minute: `make test-all ARGS=chaos` runs it"),
]

MAX_TOKENS = 300
#: Much longer than a restart takes, and than a change by hand.
POLICY = {"PDSERVE_ROUTER__ROLE_POLICY": "auto", "PDSERVE_ROUTER__ROLE_POLICY_AFTER_S": "8"}
STREAMS = range(len(BODIES))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, model: str) -> Iterator[Cluster]:
    """One worker of each tier."""
    flags = ("--dtype", "float32", "--kv-cache-memory", "256MiB", "--drain-timeout-s", "1")
    flags += ("--trust-request-chat-template",)
    with running_cluster(tmp_path_factory.mktemp("pair"), *flags, model=model, **POLICY) as cluster:
        yield cluster


async def change(cluster: Cluster, worker: str, role: str, *more: str) -> int:
    """Runs `pdserve role`; returns its exit code once the router has seen the change."""
    code = await asyncio.to_thread(main, ["role", worker, role, *more, "--base-url", cluster.base_url])
    if not code:
        await cluster.until_async(
            lambda: worker in [each.worker_id for each in cluster.workers(role)], f"the router sees that {worker} moved"
        )
    return code


@contextmanager
def nothing_restarted(cluster: Cluster) -> Iterator[None]:
    """What dies in the block stays away: the supervisor stands still."""
    cluster.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        cluster.process.send_signal(signal.SIGCONT)


async def test_roles_change_under_streams_that_lose_no_token(pair: Cluster) -> None:
    """Both workers swap their roles and back; then the only decode worker is killed, and the other one serves on."""
    router = f"127.0.0.1:{pair.port}"
    epochs = {worker.worker_id: worker.epoch for worker in pair.view().workers}
    async with pair.async_client() as client:
        undisturbed = [await choices_of(client, number, max_tokens=MAX_TOKENS) for number in STREAMS]
        is_over = asyncio.Event()

        async with asyncio.TaskGroup() as tasks:
            streams = [
                tasks.create_task(streams_until(is_over, client, number, undisturbed[number], max_tokens=MAX_TOKENS))
                for number in STREAMS
            ]
            assert await change(pair, "decode-0", "prefill") == 1  # The last one keeps its role.
            assert await change(pair, "prefill-0", "decode") == 0
            assert await change(pair, "decode-0", "prefill") == 0
            assert await change(pair, "decode-0", "decode", "--no-wait") == 0
            assert await change(pair, "prefill-0", "prefill", "--no-wait") == 0
            assert {worker.worker_id: worker.epoch for worker in pair.view().workers} == epochs
            assert await change(pair, "prefill-0", "decode") == 0
            pair.kill("decode-0")
            is_over.set()
        assert all(stream.result() > 0 for stream in streams)
    assert pair.metric(router, "pdserve_request_outcomes_total", outcome="failed") == 0
    await pair.until_async(lambda: len(pair.workers("decode")) == 2, "the killed worker is back", timeout_s=READY_S)
    assert await change(pair, "prefill-0", "prefill") == 0
    pair.wait_tiers(prefill=1, decode=1)
    pair.wait_idle()


async def test_the_policy_moves_the_prefill_worker_while_the_decode_worker_is_away_and_back(pair: Cluster) -> None:
    """Requests wait for the policy alone, and are served by the worker that is left."""
    router = f"127.0.0.1:{pair.port}"

    async def drain(*arguments: str) -> None:
        command = ["drain", "decode-0", "--no-wait", "--force", *arguments, "--base-url", pair.base_url]
        assert await asyncio.to_thread(main, command) == 0

    async with pair.async_client() as client:
        undisturbed = [await choices_of(client, number, max_tokens=MAX_TOKENS) for number in STREAMS]
        await drain()
        streams = [asyncio.create_task(choices_of(client, number, max_tokens=MAX_TOKENS)) for number in STREAMS]
        assert await asyncio.gather(*streams) == undisturbed
        assert [worker.worker_id for worker in pair.workers("decode")] == ["prefill-0"]
        await drain("--undo")
        await pair.until_async(lambda: pair.workers("prefill"), "the worker is back in its tier", timeout_s=READY_S)
    assert pair.metric(router, "pdserve_request_outcomes_total", outcome="failed") == 0
    pair.wait_tiers(prefill=1, decode=1)
    pair.wait_idle()


@pytest.mark.parametrize(("lost", "left"), [("decode-0", "prefill-0"), ("prefill-0", "decode-0")])
async def test_requests_go_on_without_the_only_worker_of_a_tier(pair: Cluster, lost: str, left: str) -> None:
    """It is killed under streams and stays away. Those go on, and others come, on the worker that is left."""
    router = f"127.0.0.1:{pair.port}"

    def computed_by(worker: str) -> float:
        [address] = [each.http_address for each in pair.view().workers if each.worker_id == worker]
        return pair.metric(address, "pdserve_generation_tokens_total")

    async with pair.async_client() as client:

        async def all_streams() -> list[object]:
            return await asyncio.gather(*(choices_of(client, number, max_tokens=MAX_TOKENS) for number in STREAMS))

        undisturbed = await all_streams()
        running = asyncio.create_task(all_streams())
        await pair.until_async(lambda: pair.workers("decode")[0].running >= len(STREAMS), "all streams run")
        with nothing_restarted(pair):
            pair.kill(lost)
            assert await running == undisturbed
            before = await asyncio.to_thread(computed_by, left)
            assert await all_streams() == undisturbed
            assert await asyncio.to_thread(computed_by, left) > before
            ready = [worker for tier in ("prefill", "decode") for worker in pair.workers(tier)]
            assert [(worker.worker_id, worker.tier) for worker in ready] == [(left, "decode")]
    assert pair.metric(router, "pdserve_request_outcomes_total", outcome="failed") == 0
    pair.wait_tiers(prefill=1, decode=1, timeout_s=READY_S)
    pair.wait_idle()


async def test_a_request_that_waits_is_taken_by_the_worker_that_gets_the_role(pair: Cluster) -> None:
    """No decode worker is ready. Prints how long the change takes, and the request from then to its first token."""

    async def ran(*arguments: str) -> None:
        assert await asyncio.to_thread(main, [*arguments, "--base-url", pair.base_url]) == 0

    def has_arrived(status: RouterStatus) -> bool:
        return status.running + status.queued > 0

    async with pair.async_client() as client:
        undisturbed = await choices_of(client, 0, max_tokens=MAX_TOKENS)
        await ran("drain", "decode-0", "--no-wait", "--force")
        await pair.until_async(lambda: not pair.workers("decode"), "no decode worker is ready")
        has_token = asyncio.Semaphore(0)
        request = asyncio.create_task(choices_of(client, 0, has_token, max_tokens=MAX_TOKENS))
        await pair.until_async(lambda: has_arrived(pair.view().router), "the request waits")
        assert has_token.locked()
        called_at = time.monotonic()
        await ran("role", "prefill-0", "decode", "--no-wait")
        changed_s = time.monotonic() - called_at
        await has_token.acquire()
        print(f"role changed after {changed_s:.3f} s, first token after {time.monotonic() - called_at:.3f} s")
        assert await request == undisturbed
        await ran("drain", "decode-0", "--undo")
        await pair.until_async(lambda: len(pair.workers("decode")) == 2, "decode-0 is ready again")
        assert await change(pair, "prefill-0", "prefill") == 0
    pair.wait_tiers(prefill=1, decode=1)
    pair.wait_idle()
