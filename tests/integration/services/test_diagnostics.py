"""Test transfers between real workers: they move real blocks, disturb no request, and free everything."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from pdserve.base.errors import LayoutMismatch, Overloaded, PdserveError, RequestError, StaleError, TransferTimeout
from pdserve.net.rpc import mapped_rpc_errors
from pdserve.observe.facts.wire import worker_from_proto
from pdserve.v1 import decode_pb2
from pdserve.v1 import diagnostics_pb2 as pb
from pdserve.v1 import diagnostics_pb2_grpc as pb_grpc
from pdserve.worker.serve import diagnostics
from tests.integration.services.local_cluster import DEADLINE_S, LocalCluster, running_cluster
from tests.unit.model.tiny import save_model

PROMPT = [(7 * position) % 90 + 3 for position in range(45)]
#: A size of many blocks of the tiny model.
SIZE = 64 * 1024


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(autouse=True)
def _without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnostics, "PAUSE_S", 0.0)


class Probe:
    """A test transfer from its requester's point of view."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.sending = pb_grpc.DiagnosticsServiceStub(cluster.prefill_channel)
        self.receiving = pb_grpc.DiagnosticsServiceStub(cluster.decode_channel)
        self.call = self.receiving.ReceiveProbe(pb.ReceiveProbeRequest(num_bytes=SIZE))

    async def event(self) -> pb.ReceiveProbeResponse:
        with mapped_rpc_errors("the receiver"):
            async with asyncio.timeout(DEADLINE_S):
                return await anext(aiter(self.call))

    async def send(self, granted: pb.ProbeTicket) -> pb.SendProbeResponse:
        request = pb.SendProbeRequest(ticket=granted.ticket, request_id=granted.request_id)
        with mapped_rpc_errors("the sender"):
            return await self.sending.SendProbe(request, timeout=DEADLINE_S)

    async def run(self) -> tuple[pb.SendProbeResponse, pb.ProbeReceived]:
        sent = await self.send((await self.event()).ticket)
        return sent, (await self.event()).received


async def until_free(cluster: LocalCluster) -> None:
    """Returns once both workers are idle and a new test transfer works."""
    await cluster.all_free()
    await Probe(cluster).run()


async def test_a_test_transfer_moves_verified_bytes_and_leaves_nothing(model: Path) -> None:
    async with running_cluster(model) as cluster:
        sent, received = await Probe(cluster).run()
        block_bytes = cluster.decode.model.layout.block_bytes
        assert sent.num_bytes == received.num_bytes == SIZE // block_bytes * block_bytes
        assert sent.total_s >= sent.wire_s >= 0
        assert received.memory_copy_bytes_per_s > 0
        # It is another connection than that of prompts: nothing is known of theirs.
        assert cluster.prefill.paths.report().paths == {}
        await until_free(cluster)


async def test_a_test_transfer_is_refused_while_a_worker_serves(model: Path) -> None:
    async with running_cluster(model) as cluster:
        request = cluster.request(PROMPT)
        await request.start()
        ticket = await request.ticket()
        with pytest.raises(Overloaded, match="serves 1 requests"):
            await Probe(cluster).event()
        await request.prefill(ticket)
        await request.finish()
        await until_free(cluster)


async def test_a_second_test_transfer_is_refused_during_the_first(model: Path) -> None:
    async with running_cluster(model) as cluster:
        first = Probe(cluster)
        granted = await first.event()
        with pytest.raises(Overloaded, match="has just done a test transfer"):
            await Probe(cluster).event()
        await first.send(granted.ticket)
        assert (await first.event()).HasField("received")


async def test_a_test_transfer_soon_after_another_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnostics, "PAUSE_S", 1000.0)
    async with running_cluster(model) as cluster:
        await Probe(cluster).run()
        await cluster.all_free()
        with pytest.raises(Overloaded) as refusal:
            await Probe(cluster).event()
        assert refusal.value.retry_after_s == 1000.0


async def test_a_draining_worker_takes_no_test_transfer(model: Path) -> None:
    async with running_cluster(model) as cluster:
        cluster.decode.calls.drain()
        with pytest.raises(PdserveError, match="shutting down"):
            await Probe(cluster).event()


async def test_a_requester_that_leaves_frees_everything(model: Path) -> None:
    async with running_cluster(model) as cluster:
        probe = Probe(cluster)
        granted = (await probe.event()).ticket
        probe.call.cancel()
        await cluster.all_free()
        with pytest.raises(StaleError):
            await probe.send(granted)
        await until_free(cluster)


async def test_a_sender_that_never_comes_costs_a_lease(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnostics, "LEASE_S", 0.2)
    async with running_cluster(model) as cluster:
        probe = Probe(cluster)
        await probe.event()
        with pytest.raises(TransferTimeout):
            await probe.event()
        await until_free(cluster)


async def test_a_request_that_comes_during_a_test_transfer_is_served(model: Path) -> None:
    async with running_cluster(model) as cluster:
        expected = await cluster.local(PROMPT)
        await cluster.all_free()
        probe = Probe(cluster)
        granted = (await probe.event()).ticket
        request = cluster.request(PROMPT)
        await request.start()
        await request.prefill(await request.ticket())
        assert await request.finish() == expected
        await cluster.prefill.calls.wait_idle()
        await probe.send(granted)
        await until_free(cluster)


async def test_unequal_layouts_are_named(model: Path) -> None:
    async with running_cluster(model, decode={"block_size": 8}) as cluster:
        with pytest.raises(LayoutMismatch, match="block_size is 4 here and 8 there"):
            await Probe(cluster).run()


async def test_decode_workers_send_no_test_transfer(model: Path) -> None:
    async with running_cluster(model) as cluster:
        probe = Probe(cluster)
        granted = (await probe.event()).ticket
        refusal = pytest.raises(RequestError, match="Decode workers send no blocks")
        with refusal, mapped_rpc_errors("the decode worker"):
            await probe.receiving.SendProbe(pb.SendProbeRequest(ticket=granted.ticket))


async def test_a_forged_commit_and_an_absurd_size_are_refused(model: Path) -> None:
    async with running_cluster(model) as cluster:
        probe = Probe(cluster)
        granted = (await probe.event()).ticket
        forged = decode_pb2.CommitRequest(
            transfer_id=bytes(16), epoch=granted.ticket.epoch, first_tokens=[0], mac=bytes(32)
        )
        with pytest.raises(PdserveError), mapped_rpc_errors("the receiver"):
            await probe.receiving.CommitProbe(forged)
        granted.ticket.num_blocks = 1 << 18
        with pytest.raises(RequestError, match="too large"):
            await probe.send(granted)


async def test_a_worker_describes_itself_and_its_machine(model: Path) -> None:
    async with running_cluster(model) as cluster:
        stub = pb_grpc.DiagnosticsServiceStub(cluster.decode_channel)
        facts = worker_from_proto(await stub.Describe(pb.DescribeRequest(), timeout=DEADLINE_S))
        assert (facts.worker_id, facts.tier, facts.layout) == ("decode", "decode", cluster.decode.model.layout)
        assert facts.machine.total_memory_bytes > facts.machine.available_memory_bytes > 0
        assert facts.machine.host.pid > 0
        assert "cannot be used" in facts.redis.error
