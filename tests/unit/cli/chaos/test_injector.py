"""Faults on a real process: it stands still, or has no file to open or to write, and is as before afterwards."""

from __future__ import annotations

import asyncio
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pdserve.cli.chaos.client import Clients, Reader, open_http
from pdserve.cli.chaos.cluster import ChaosCluster
from pdserve.cli.chaos.faults import Fault
from pdserve.cli.chaos.injector import LASTING, Injector, empty_redis
from pdserve.cli.chaos.outcome import Outcome
from pdserve.cli.chaos.workload import COMPLETIONS, ChaosRequest, Sending
from pdserve.cli.private_redis import PrivateRedis
from pdserve.cli.supervisor.spec import BecameReady, ProcessSpec, ProcessStarted
from pdserve.redis.store import Store
from tests.support.redis import eventually, running

#: Answers each line with whether it can open a file, and whether it can write one.
_PROGRAM = """
import sys, tempfile
kept = tempfile.TemporaryFile(buffering=0)
print("ready", flush=True)
for line in sys.stdin:
    found = []
    for action in (lambda: open("/dev/null").close(), lambda: kept.write(b"x")):
        try:
            action()
            found.append("yes")
        except OSError:
            found.append("no")
    print(*found, flush=True)
"""


@pytest.fixture
def process() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-S", "-c", _PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "ready\n"
        yield running
        running.kill()


def can_open_and_write(process: subprocess.Popen[str]) -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("?\n")
    return process.stdout.readline().strip()


@pytest.mark.parametrize(("kind", "found"), [("descriptors", "no yes"), ("files", "yes no")])
async def test_a_limit_holds_for_the_time_of_the_fault(process: subprocess.Popen[str], kind: str, found: str) -> None:
    limits = resource.prlimit(process.pid, resource.RLIMIT_NOFILE), resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
    assert can_open_and_write(process) == "yes yes"
    async with LASTING[kind](process.pid):
        assert can_open_and_write(process) == found
    assert can_open_and_write(process) == "yes yes"
    after = resource.prlimit(process.pid, resource.RLIMIT_NOFILE), resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
    assert after == limits


async def test_a_stopped_process_goes_on_even_if_the_run_is_cancelled(process: subprocess.Popen[str]) -> None:
    stopped = asyncio.Event()

    async def hold() -> None:
        async with LASTING["stop-worker"](process.pid):
            stopped.set()
            await asyncio.Event().wait()

    holding = asyncio.create_task(hold())
    await stopped.wait()
    found = psutil.Process(process.pid)
    while found.status() != psutil.STATUS_STOPPED:  # noqa: ASYNC110 (the signal is delivered, then acted upon)
        await asyncio.sleep(0)
    holding.cancel()
    await asyncio.wait([holding])
    assert can_open_and_write(process) == "yes yes"


@pytest.mark.parametrize("kind", list(LASTING))
async def test_a_process_that_has_ended_is_no_error(process: subprocess.Popen[str], kind: str) -> None:
    process.kill()
    process.wait()
    async with LASTING[kind](process.pid):
        pass


def reader_at(router: int) -> Reader:
    """A client whose stream runs on that router."""
    request = ChaosRequest(index=0, path=COMPLETIONS, body={"prompt": "a", "stream": True})
    outcome = Outcome(
        sending=Sending(number=0, request=request, cache_salt=None, router=router),
        request_id="c-0",
        started_at=0.0,
        routers=[(0.0, router)],
    )
    return Reader(outcome, None, has_answered=True, attached_at=time.monotonic())


@pytest.mark.parametrize(("stream_at", "skipped"), [(0, ["flush-redis"]), (1, ["kill-router"])])
async def test_redis_is_not_emptied_while_a_stream_is_without_its_router_and_loses_no_connection(
    process: subprocess.Popen[str], stream_at: int, skipped: list[str]
) -> None:
    """The supervisor has not noticed the end of the router yet."""
    async with PrivateRedis() as redis, Store(redis.url) as store, open_http() as http:
        cluster = ChaosCluster()
        cluster.redis_url = redis.url
        for name in ("router-0", "router-1", "redis"):
            spec = ProcessSpec(name=name, argv=(), environment={}, log_path=Path("/dev/null"))
            cluster.on_event(ProcessStarted(spec=spec, pid=process.pid))
            cluster.on_event(BecameReady(spec=spec, took_s=0.0, is_restart=False))
        clients = Clients(http, model="m", urls=(), choose=lambda _: None, prefix="c", timeout_s=30)
        clients.running.append(reader_at(stream_at))
        await store.call("SET", "kept", "1")
        injector = Injector(cluster, clients, send_burst=lambda: False)

        async def is_empty() -> bool:
            return not await store.call("EXISTS", "kept")

        async def has_injected_all() -> bool:
            return len(injector.injected) + len(injector.skipped) == 3

        plan = [Fault(at_s=0, kind=kind, choice=0.0) for kind in ("kill-router", "flush-redis", "kill-router")]
        async with running(injector.run([*plan, Fault(at_s=3600, kind="disconnect", choice=0.0)])):
            await eventually(has_injected_all)
            assert injector.skipped == skipped
            if skipped == ["kill-router"]:
                await eventually(is_empty)
            assert await is_empty() == (skipped == ["kill-router"])
        assert store.outages == 0


async def test_a_fault_without_a_target_is_replaced_by_the_next_one_that_has_one(
    process: subprocess.Popen[str],
) -> None:
    async with open_http() as http:
        cluster = ChaosCluster()
        spec = ProcessSpec(name="decode-0", argv=(), environment={}, log_path=Path("/dev/null"))
        cluster.on_event(ProcessStarted(spec=spec, pid=process.pid))
        cluster.on_event(BecameReady(spec=spec, took_s=0.0, is_restart=False))
        clients = Clients(http, model="m", urls=(), choose=lambda _: None, prefix="c", timeout_s=30)
        injector = Injector(cluster, clients, send_burst=lambda: False)
        others = [Fault(at_s=0, kind=kind, choice=0.0) for kind in ("stop-redis", "disconnect", "stop-worker")]
        last = Fault(at_s=3600, kind="disconnect", choice=0.0)

        async def is_done() -> bool:
            return injector.num_faults + len(injector.skipped) == 2

        replaced = Fault(at_s=0, kind="stop-router", choice=0.0, instead=tuple(others))
        async with running(injector.run([replaced, Fault(at_s=0, kind="kill-router", choice=0.0), last])):
            await eventually(is_done)
        assert [(each.kind, each.target) for each in injector.injected] == [("stop-worker", "decode-0")]
        assert (injector.num_faults, injector.num_kills, injector.skipped) == (1, 0, ["kill-router"])


async def test_a_redis_that_has_ended_cannot_be_emptied_and_is_no_error() -> None:
    async with PrivateRedis() as redis:
        url = redis.url
    await empty_redis(url)
