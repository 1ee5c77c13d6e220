"""The load that workers report: queued prompts by router, and at once when none is left."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from kvtransfer.transport.inproc import InprocTransport
from pdserve.base.wire import sampling_to_wire
from pdserve.cli.private_redis import PrivateRedis
from pdserve.engine.block_manager import BlockManager
from pdserve.engine.step import Load
from pdserve.net.admin import Health
from pdserve.peers.registry import Registrar
from pdserve.redis.store import Store
from pdserve.v1 import decode_pb2, prefill_pb2, prefill_pb2_grpc
from pdserve.worker.serve.announce import WorkerAddresses, announce
from pdserve.worker.serve.step_metrics import StepMetrics
from pdserve.worker.serve.worker import TierService, Worker
from prefill_svc.config import PrefillConfig
from prefill_svc.service import PrefillService
from tests.integration.services.local_cluster import ROUTER, running_cluster, running_worker
from tests.support.deadline import DEADLINE_S
from tests.unit.model.tiny import save_model

PROMPT = [(7 * position) % 90 + 3 for position in range(45)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("tiny"))


async def test_a_prompt_is_reported_under_the_id_of_its_router_while_it_is_computed(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: dict[int, list[Load]] = {}
    set_load = StepMetrics.set_load

    def note(steps: StepMetrics, load: Load) -> None:
        reported.setdefault(id(steps), []).append(load)
        set_load(steps, load)

    monkeypatch.setattr(StepMetrics, "set_load", note)
    async with running_cluster(model) as cluster:
        request = cluster.request(PROMPT)
        await request.start()
        ticket = await request.ticket()
        assert cluster.decode.load.queued_by_router == {}
        await request.prefill(ticket)
        await request.finish()
        another = cluster.request([4, *PROMPT])
        await another.start()
        await another.ticket()
        await another.send(prefill_locally=decode_pb2.PrefillLocally(attempt=1))
        await another.finish()
        for worker, tokens in ((cluster.prefill, len(PROMPT)), (cluster.decode, len(PROMPT) + 1)):
            assert {ROUTER: tokens} in [load.queued_by_router for load in reported[id(worker.steps)]]
            assert worker.load.queued_by_router == {}
        await cluster.all_free()


async def test_a_waiting_prompt_reports_its_cached_tokens(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefill_svc.session.KEEP_ALIVE_S", 0.02)
    async with running_cluster(model) as cluster:
        await cluster.request(PROMPT).prefill(None)
        monkeypatch.setattr(BlockManager, "admit", lambda *_, **__: False)
        request = cluster.request([*PROMPT, 5])
        call = prefill_pb2_grpc.PrefillServiceStub(cluster.prefill_channel).Prefill(
            prefill_pb2.PrefillRequest(
                ref=request.ref(), prompt_token_ids=request.prompt, sampling=sampling_to_wire(request.params)
            )
        )
        async with asyncio.timeout(DEADLINE_S):
            progress = (await anext(aiter(call))).progress
        block_size = cluster.prefill.model.layout.block_size
        cached = len(PROMPT) // block_size * block_size
        assert (progress.queued, progress.computed_tokens, progress.cached_tokens) == (True, 0, cached)
        assert cluster.prefill.load.queued_by_router == {ROUTER: len(PROMPT) + 1 - cached}
        call.cancel()
        await cluster.all_free()


async def test_an_empty_queue_is_announced(
    model: Path, redis_server: PrivateRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    announced: list[Registrar] = []
    monkeypatch.setattr(Registrar, "announce_empty_queue", lambda registrar: announced.append(registrar))
    config = PrefillConfig(
        model=str(model), redis_url=redis_server.url, block_size=4, kv_cache_memory=64 * 1024, threads=1
    )
    services: list[TierService] = []

    def build(worker: Worker) -> TierService:
        services.append(PrefillService(worker, config))
        return services[0]

    transport = InprocTransport()
    async with Store(redis_server.url) as store, running_worker(config, "prefill", transport, build) as (worker, at, _):
        addresses = WorkerAddresses(grpc=at, http="", streams="")
        registrar = announce(worker, services[0], store=store, health=Health(), addresses=addresses)
        idle = worker.load
        worker.steps.set_load(replace(idle, queued_prompt_tokens=45))
        assert announced == []
        worker.steps.set_load(idle)
        assert announced == [registrar]
    await transport.close()
