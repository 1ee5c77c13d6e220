"""A serving worker is watched for hangs, and a draining one ends with its step loop."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import cast

import pytest

from pdserve.base import errors
from pdserve.base.errors import PdserveError, PeerLost
from pdserve.base.tasks import service_group
from pdserve.net.admin import Health
from pdserve.net.rpc import GrpcHealth
from pdserve.peers.registry import Registrar
from pdserve.worker.serve import process
from pdserve.worker.serve.active_calls import ActiveCalls
from pdserve.worker.serve.process import _drain, _start_accepting
from pdserve.worker.serve.worker import TierService, Worker


class Draining:
    """A worker with one request."""

    def __init__(self, timeout_s: float = 20.0) -> None:
        self.calls = ActiveCalls()
        self.calls.accept()
        self.health = Health()
        self.fatal: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self._worker = cast(
            Worker,
            SimpleNamespace(worker_id="w", calls=self.calls, config=SimpleNamespace(drain_timeout_s=timeout_s)),
        )

        self.drained_within: list[float] = []
        self.given_up: list[PdserveError] = []
        self._service = cast(
            TierService, SimpleNamespace(drain=self.drained_within.append, give_up=self.given_up.append)
        )

    async def drain(self) -> None:
        await _drain(self._worker, self._service, self.fatal, self.health)


async def test_a_rank_lost_while_draining_ends_the_worker() -> None:
    draining = Draining()
    with draining.calls.serving():
        task = asyncio.create_task(draining.drain())
        await asyncio.sleep(0)
        draining.fatal.set_result(PeerLost("rank 1 is lost"))
        with pytest.raises(PeerLost, match="rank 1 is lost"):
            await asyncio.wait_for(task, 10)
    assert draining.health.dead is not None
    assert "rank 1 is lost" in draining.health.dead


async def test_draining_ends_with_the_last_request_or_at_its_timeout() -> None:
    draining = Draining()
    with draining.calls.serving():
        task = asyncio.create_task(draining.drain())
        await asyncio.sleep(0)
    await asyncio.wait_for(task, 10)
    assert draining.health.dead is None
    assert (draining.drained_within, draining.given_up) == ([20.0], [])
    impatient = Draining(timeout_s=0.01)
    with impatient.calls.serving():
        await asyncio.wait_for(impatient.drain(), 10)
    # Routers learn that this is no loss.
    assert [type(error) for error in impatient.given_up] == [errors.Draining]


@pytest.mark.virtual_time
async def test_a_worker_that_accepts_requests_is_watched_for_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    # What the tests of this process have made has to be collected.
    monkeypatch.setattr(process, "exempt_all", lambda: None)
    loop = SimpleNamespace(stalled_s=0.0, position="forward (decoder.py:88)")
    health, serving, announced = Health(), list[bool](), list[bool]()

    class Switch:
        async def set_serving(self, is_serving: bool) -> None:
            serving.append(is_serving)

    async def read_vocabulary() -> None:
        assert not health.is_ready

    registrar = SimpleNamespace(announce=lambda: announced.append(health.is_ready))
    async with service_group() as tasks:
        worker = SimpleNamespace(
            calls=ActiveCalls(),
            grammars=SimpleNamespace(read_vocabulary=read_vocabulary),
            tasks=tasks,
            step_loop=loop,
            steps=SimpleNamespace(longest_step_s=0.0),
            config=SimpleNamespace(stall_timeout_s=300.0),
        )
        await _start_accepting(cast(Worker, worker), health, cast(GrpcHealth, Switch()), cast(Registrar, registrar))
        assert (health.is_ready, serving, announced) == (True, [True], [True])
        await asyncio.sleep(3600)
        assert health.is_live
        loop.stalled_s = 300.0
        await asyncio.sleep(10)
        # Probes, gRPC's health service and the registry agree.
        assert (health.is_live, serving, announced) == (False, [True, False], [True, False])
