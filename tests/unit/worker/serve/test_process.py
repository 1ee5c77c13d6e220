"""A serving worker is watched for hangs, a draining one ends with its step loop, a transport gets the right device."""

from __future__ import annotations

import asyncio
import errno
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest

from kvtransfer.transport.inproc import InprocTransport
from pdserve.base import errors
from pdserve.base.errors import PdserveError, PeerLost, SetupError
from pdserve.base.tasks import service_group
from pdserve.net.admin import Health
from pdserve.net.rpc import GrpcHealth
from pdserve.peers.peer_tls import PeerTls
from pdserve.peers.registry import Registrar
from pdserve.peers.seals import Seals
from pdserve.peers.secret import parse_secret
from pdserve.worker.config import WorkerConfig
from pdserve.worker.serve import process
from pdserve.worker.serve.active_calls import ActiveCalls
from pdserve.worker.serve.metrics import WorkerMetrics
from pdserve.worker.serve.process import _drain, _keeps_strangers_out, _opened_transport, _start_accepting
from pdserve.worker.serve.worker import TierService, Worker

SECRET = "the-secret-of-this-cluster"


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


@pytest.mark.parametrize(("memory", "device"), [("device", "cuda:1"), ("host", None)])
async def test_a_transport_gets_the_gpu_that_holds_its_buffers(
    monkeypatch: pytest.MonkeyPatch, memory: str, device: str | None
) -> None:
    devices: list[str | None] = []

    def open_transport(name: str, *, device: str | None, **_: object) -> InprocTransport:
        devices.append(device)
        return InprocTransport()

    monkeypatch.setattr(process, "open_transport", open_transport)
    monkeypatch.setattr(process, "bind_thread", lambda config: None)
    config = WorkerConfig(model="m", redis_url="", device="cuda:1", transport="nccl", handover_memory=memory)
    metrics = WorkerMetrics(tier="prefill", model_name="m")
    async with _opened_transport(config, Seals(), None, metrics):
        assert devices == [device]


@pytest.mark.parametrize(
    ("words", "has_tls", "guard_transport", "guarded"),
    [
        (None, False, "auto", False),
        (None, True, "auto", True),
        (SECRET, False, "auto", True),
        (SECRET, False, "require", True),
        (SECRET, False, "off", False),
        # On the way to a secret, workers without it are let in.
        (f"{SECRET} open", False, "auto", False),
        (f"{SECRET} open", True, "auto", True),
    ],
)
def test_strangers_are_kept_out_where_peers_can_prove_who_they_are(
    monkeypatch: pytest.MonkeyPatch, words: str | None, has_tls: bool, guard_transport: str, guarded: bool
) -> None:
    monkeypatch.setattr(process, "filter_refusal", lambda: 0)
    config = WorkerConfig(model="m", redis_url="", guard_transport=guard_transport)
    seals = Seals(None if words is None else parse_secret(words, where="test"))
    tls = cast(PeerTls, object()) if has_tls else None
    assert _keeps_strangers_out(config, seals, tls) is guarded


def test_where_the_kernel_refuses_filters_a_worker_starts_and_says_so_unless_the_guard_is_required(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Fails when such a worker does not start: no user but root could have a cluster there, or is silent about it."""
    monkeypatch.setattr(process, "filter_refusal", lambda: errno.EPERM)
    seals = Seals(parse_secret(SECRET, where="test"))
    config = WorkerConfig(model="m", redis_url="")
    assert not _keeps_strangers_out(config, seals, None)
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == ["transport_not_guarded"]
    with pytest.raises(SetupError, match=r"Operation not permitted.*CAP_NET_ADMIN"):
        _keeps_strangers_out(replace(config, guard_transport="require"), seals, None)
    caplog.clear()
    assert not _keeps_strangers_out(replace(config, transport="nccl"), seals, None)
    assert not caplog.records


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
