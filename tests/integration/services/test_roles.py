"""Workers change their roles while requests run: both roles are served meanwhile, exactly, and nothing is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest

from pdserve.base.errors import Draining, RequestError
from pdserve.base.ids import Epoch, WorkerId
from pdserve.engine.shared import SharedScheduler
from pdserve.net.rpc import ChannelPool, mapped_rpc_errors
from pdserve.peers.workers import WorkerRecord
from pdserve.v1 import diagnostics_pb2 as pb
from pdserve.v1 import diagnostics_pb2_grpc as pb_grpc
from pdserve.worker.serve.announce import WorkerAddresses, worker_record
from pdserve.worker.serve.worker import TierService, Worker
from router_svc.routing import role_orders
from router_svc.routing.role_orders import order_roles
from router_svc.routing.role_policy import RolePolicy
from tests.integration.services import local_cluster
from tests.integration.services.local_cluster import ALWAYS_LOCAL, DEADLINE_S, running_cluster
from tests.unit.model.tiny import save_model

PROMPT = [(7 * position) % 90 + 3 for position in range(45)]
OTHER = [(11 * position) % 90 + 3 for position in range(45)]
LONG = 60
BLOCKS = {"kv_cache_memory": 128 * 1024}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("tiny"))


async def change(channel: grpc.aio.Channel, role: str, *, reason: str = "operator") -> pb.ChangeRoleResponse:
    """As `pdserve role` does. Raises the worker's error."""
    request = pb.ChangeRoleRequest(role=role, reason=reason)
    with mapped_rpc_errors("the worker"):
        answer: pb.ChangeRoleResponse = await pb_grpc.DiagnosticsServiceStub(channel).ChangeRole(
            request, timeout=DEADLINE_S
        )
        return answer


@contextmanager
def decoding_held(worker: Worker) -> Iterator[None]:
    """Sequences of this worker stand still until the block ends, so that they are there whatever else happens."""
    scheduler: Any = cast(SharedScheduler, worker._scheduler)._decode
    scheduler.has_work = lambda: False
    try:
        yield
    finally:
        del scheduler.has_work
        worker.post(lambda: None)


async def test_both_workers_swap_roles_under_requests_that_keep_their_tokens(model: Path) -> None:
    """What the decode worker has stays there while it prefills for the other one."""
    async with running_cluster(model, have_roles=True, prefill=BLOCKS, decode=BLOCKS) as cluster:
        expected, other = await cluster.local(PROMPT, max_tokens=LONG), await cluster.local(OTHER)
        early = cluster.request(PROMPT, max_tokens=LONG)
        await early.start()
        ticket = await early.ticket()
        with decoding_held(cluster.decode):
            await early.prefill(ticket)
            await cluster.prefill.calls.wait_idle()  # It has said that it is done, and ends its call after that.
            assert (await change(cluster.decode_channel, "prefill")).former_requests == 1
            assert (await change(cluster.prefill_channel, "decode")).former_requests == 0
            swapped = cluster.with_roles_swapped()
            late = swapped.request(OTHER)
            await late.start()
            await late.prefill(await late.ticket())
            assert await late.finish() == other
        assert await early.finish() == expected
        await cluster.all_free()
        answer = await change(cluster.decode_channel, "prefill")
        assert (answer.role, answer.former_requests) == ("prefill", 0)


async def test_a_changed_worker_refuses_its_former_tier_and_takes_the_new_one_at_once(model: Path) -> None:
    async with running_cluster(model, have_roles=True) as cluster:
        expected = await cluster.local(PROMPT)
        await change(cluster.prefill_channel, "decode")
        with pytest.raises(Draining, match="left the prefill tier for the decode tier"):
            await cluster.request(PROMPT).prefill(None)
        swapped = cluster.with_roles_swapped()
        assert await swapped.local(PROMPT) == expected
        await change(cluster.prefill_channel, "prefill")
        refused = swapped.request(PROMPT)
        await refused.start()
        with pytest.raises(Draining, match="left the decode tier for the prefill tier"):
            await refused.event()
        await cluster.request(PROMPT).prefill(None)
        await cluster.all_free()


async def test_the_prefix_cache_and_the_incarnation_outlive_the_change(model: Path) -> None:
    async with running_cluster(model, have_roles=True) as cluster:
        epoch, weights = cluster.prefill.epoch, cluster.prefill.model
        await cluster.request(PROMPT).prefill(None)
        await change(cluster.prefill_channel, "decode")
        request = cluster.with_roles_swapped().request(PROMPT)
        await request.start(local_prefill_threshold=ALWAYS_LOCAL)
        assert (await request.event()).started.cached_tokens == 44
        await request.finish()
        assert cluster.prefill.epoch == epoch
        assert cluster.prefill.model is weights
        await cluster.all_free()


async def test_the_record_has_the_present_tier(model: Path) -> None:
    addresses = WorkerAddresses(grpc="h:1", http="h:2", streams="h:3")
    async with running_cluster(model, have_roles=True) as cluster:
        worker = cluster.prefill
        service = cast(TierService, _ServiceOf())
        before = worker_record(worker, service, addresses, ready=True)
        await change(cluster.prefill_channel, "decode", reason="policy")
        after = worker_record(worker, service, addresses, ready=True)
        assert (before.tier, before.stream_address, before.home_tier) == ("prefill", "", "prefill")
        assert (after.tier, after.stream_address, after.home_tier) == ("decode", "h:3", "prefill")
        assert (after.worker_id, after.epoch) == (WorkerId("prefill"), Epoch(before.epoch))
        value = worker.metrics.registry.get_sample_value
        labels = worker.metrics.labels(role="decode")
        assert value("pdserve_worker_role", labels) == 1
        assert value("pdserve_worker_role", worker.metrics.labels(role="prefill")) == 0
        assert value("pdserve_role_changes_total", labels | {"reason": "policy"}) == 1


async def test_the_policy_of_a_router_has_a_worker_take_the_role_of_a_lost_one(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = asyncio.Event()

    async def published() -> None:
        changed.set()

    monkeypatch.setattr(role_orders, "_LOOK_S", 0.0)
    monkeypatch.setattr(local_cluster, "_published", published)
    addresses = WorkerAddresses(grpc="", http="h:2", streams="h:3")
    async with running_cluster(model, have_roles=True) as local:
        workers = [local.prefill, local.decode]

        def ready(tier: str) -> list[WorkerRecord]:
            records = (
                worker_record(each, cast(TierService, _ServiceOf()), addresses, ready=True)
                for each in workers
                if each.tier == tier
            )
            return [replace(each, grpc_address=local.prefill_address) for each in records]

        cluster: Any = SimpleNamespace(
            ready=ready,
            directory=SimpleNamespace(degraded=False),
            sealed=lambda purpose, worker, message: message,
            channels=ChannelPool(),
        )
        policy = RolePolicy(after_s=0.0, expects_prefill=True)
        orders = asyncio.create_task(order_roles(cluster, policy))
        await asyncio.sleep(0)
        workers.remove(local.decode)
        async with asyncio.timeout(DEADLINE_S):
            await changed.wait()
        assert local.prefill.tier == "decode"
        orders.cancel()
        await asyncio.wait((orders,))
        await cluster.channels.close()
        labels = local.prefill.metrics.labels(role="decode", reason="policy")
        assert local.prefill.metrics.registry.get_sample_value("pdserve_role_changes_total", labels) == 1


class _ServiceOf:
    """What a record needs of a service."""

    max_num_seqs, itl_budget_s = 4, None


async def test_a_worker_with_one_role_for_life_says_how_to_start_another(model: Path) -> None:
    async with running_cluster(model) as cluster:
        with pytest.raises(RequestError, match=r"worker_svc\.prefill"):
            await change(cluster.prefill_channel, "decode")
        with pytest.raises(RequestError, match="Roles are prefill and decode"):
            await change(cluster.decode_channel, "router")
        assert (await change(cluster.decode_channel, "decode")).role == "decode"
