"""A process without the cluster's secret: workers refuse what it sends, and nothing of it reaches their caches."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kvtransfer.transport import Peer
from kvtransfer.transport.inproc import InprocTransport
from kvtransfer.transport.ucx_address import pack_address
from pdserve.base.errors import PeerRefused, RequestError
from pdserve.base.wire import sampling_to_wire
from pdserve.net.newcomers import Newcomers
from pdserve.net.rpc import mapped_rpc_errors
from pdserve.net.streams import open_stream
from pdserve.peers.seals import Purpose, Refusal, Seals
from pdserve.peers.secret import parse_secret
from pdserve.v1 import decode_pb2, decode_pb2_grpc, diagnostics_pb2, diagnostics_pb2_grpc
from pdserve.worker.serve.worker import Worker
from tests.integration.services.local_cluster import ALWAYS_LOCAL, DEADLINE_S, LocalCluster, running_cluster
from tests.support.own_task import in_own_task
from tests.unit.model.tiny import save_model

PROMPT = [(7 * position) % 90 + 3 for position in range(45)]
NOT_GRANTED = pack_address(b"\xff" * 64)


class Watched(InprocTransport):
    """Keeps the addresses that it connects to."""

    def __init__(self) -> None:
        super().__init__()
        self.connected: list[bytes] = []

    async def connect(self, address: bytes) -> Peer:
        self.connected.append(address)
        return await super().connect(address)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def transport() -> Watched:
    return Watched()


@pytest.fixture
async def cluster(model: Path, tmp_path: Path, transport: Watched) -> AsyncIterator[LocalCluster]:
    """Workers and a router with a secret."""
    file = tmp_path / "secret"
    file.write_text("the-secret-of-this-cluster\n")
    settings: dict[str, Any] = {"cluster_secret_file": str(file)}
    running = running_cluster(model, prefill=settings, decode=settings, prefill_transport=transport)
    async with in_own_task(running) as cluster:
        yield cluster
        await cluster.all_free()


def _refused(worker: Worker, reason: Refusal) -> float:
    labels = worker.metrics.labels(reason=reason)
    return worker.metrics.registry.get_sample_value("pdserve_peer_messages_refused_total", labels) or 0.0


async def _cached(worker: Worker) -> int:
    return await worker.run(lambda: sum(map(len, worker.model.pool._by_hash)))


STRANGERS = {"open": Seals(), "foreign": Seals(parse_secret("the-secret-of-another-cluster", where="test"))}
REASONS = {"open": Refusal.MISSING, "foreign": Refusal.FORGED}


@pytest.fixture(params=STRANGERS)
def stranger(request: pytest.FixtureRequest, cluster: LocalCluster) -> Refusal:
    """Has the router's place taken by somebody without the secret. Returns why workers refuse it."""
    cluster.seals = STRANGERS[request.param]
    return REASONS[request.param]


async def test_a_cluster_with_a_secret_gives_the_tokens_of_an_open_one(model: Path, cluster: LocalCluster) -> None:
    request = cluster.request(PROMPT)
    await request.start()
    await request.prefill(await request.ticket())
    tokens = await request.finish()
    assert tokens == await cluster.local(PROMPT)
    async with running_cluster(model) as opened:
        assert tokens == await opened.local(PROMPT)


async def test_a_stranger_gets_no_ticket_and_poisons_no_cache(cluster: LocalCluster, stranger: Refusal) -> None:
    """Finding 7: the ticket's key lets anybody register their blocks under the hashes of a prompt."""
    request = cluster.request(PROMPT)
    await request.start()
    with pytest.raises(PeerRefused):
        await request.ticket()
    request.cancel()
    assert _refused(cluster.decode, stranger) == 1
    assert await _cached(cluster.decode) == 0


async def test_a_replayed_start_gets_no_answer(cluster: LocalCluster) -> None:
    first, second = cluster.request(PROMPT, "r1"), cluster.request(PROMPT, "r1")
    start = decode_pb2.DecodeStart(
        ref=first.ref(),
        prompt_token_ids=PROMPT,
        sampling=sampling_to_wire(first.params),
        local_prefill_threshold=ALWAYS_LOCAL,
    )
    sealed = cluster.seals.seal(Purpose.START, cluster.decode.seal_name, start)
    await first.send(start=sealed)
    assert (await first.event()).HasField("started")
    first.cancel()
    await cluster.decode.calls.wait_idle()
    await second.send(start=sealed)
    with pytest.raises(PeerRefused, match="has been here before"):
        await second.event()
    second.cancel()
    assert _refused(cluster.decode, Refusal.REPLAYED) == 1


async def test_a_prefill_worker_connects_to_no_address_of_a_stranger(
    cluster: LocalCluster, transport: Watched, stranger: Refusal
) -> None:
    """Finding 6: a ticket names an address that aborts UCX, and a host to be called."""
    ticket = _forged_ticket(cluster)
    with pytest.raises(PeerRefused):
        await cluster.request(PROMPT).prefill(ticket)
    assert _refused(cluster.prefill, stranger) == 1
    assert transport.connected == []


async def test_a_prefill_worker_connects_to_no_address_that_no_decode_worker_granted(
    cluster: LocalCluster, transport: Watched
) -> None:
    """Not even for a router of the cluster, which may have been given it by an impostor."""
    with pytest.raises(PeerRefused):
        await cluster.request(PROMPT).prefill(_forged_ticket(cluster))
    request = diagnostics_pb2.SendProbeRequest(ticket=_forged_ticket(cluster), request_id="r1")
    sealed = cluster.seals.seal(Purpose.PROBE, cluster.prefill.seal_name, request)
    with pytest.raises(PeerRefused), mapped_rpc_errors("the prefill worker"):
        await diagnostics_pb2_grpc.DiagnosticsServiceStub(cluster.prefill_channel).SendProbe(sealed)
    assert _refused(cluster.prefill, Refusal.MISSING) == 2
    assert transport.connected == []


async def test_a_stranger_gets_no_facts_and_no_test_transfer(cluster: LocalCluster, stranger: Refusal) -> None:
    """Fails without the seals of these requests."""
    stub = diagnostics_pb2_grpc.DiagnosticsServiceStub(cluster.decode_channel)
    at_decode = cluster.decode.seal_name
    describe = cluster.seals.seal(Purpose.DESCRIBE, at_decode, diagnostics_pb2.DescribeRequest())
    receive = cluster.seals.seal(Purpose.PROBE, at_decode, diagnostics_pb2.ReceiveProbeRequest(num_bytes=1))
    with pytest.raises(PeerRefused), mapped_rpc_errors("the decode worker"):
        await stub.Describe(describe)
    with pytest.raises(PeerRefused), mapped_rpc_errors("the decode worker"):
        async for event in stub.ReceiveProbe(receive):
            raise AssertionError(f"a stranger got {event}")
    assert _refused(cluster.decode, stranger) == 2


async def test_a_stranger_drains_no_worker(cluster: LocalCluster, stranger: Refusal) -> None:
    """Fails without the seal of this request: an error that the worker is still starting."""
    stub = diagnostics_pb2_grpc.DiagnosticsServiceStub(cluster.decode_channel)
    request = cluster.seals.seal(Purpose.DRAIN, cluster.decode.seal_name, diagnostics_pb2.DrainRequest())
    with pytest.raises(PeerRefused), mapped_rpc_errors("the decode worker"):
        await stub.Drain(request)
    assert _refused(cluster.decode, stranger) == 1


async def test_a_commit_of_a_stranger_who_knows_the_tickets_key_is_refused(cluster: LocalCluster) -> None:
    request = cluster.request(PROMPT)
    await request.start()
    ticket = await request.ticket()
    commit = decode_pb2.CommitRequest(
        ref=request.ref(), transfer_id=ticket.transfer_id, epoch=ticket.epoch, first_tokens=[5], mac=bytes(32)
    )
    with pytest.raises(PeerRefused), mapped_rpc_errors("the decode worker"):
        await decode_pb2_grpc.DecodeServiceStub(cluster.decode_channel).Commit(commit)
    assert _refused(cluster.decode, Refusal.MISSING) == 1
    # The transfer goes on as if nothing had happened.
    await request.prefill(ticket)
    assert await request.finish() == await cluster.local(PROMPT)


async def test_blocks_received_while_strangers_are_accepted_stay_with_their_request(
    model: Path, tmp_path: Path
) -> None:
    """On the way to a secret: a second request with the same prompt finds nothing cached on the decode worker."""
    file = tmp_path / "secret"
    file.write_text("the-secret-of-this-cluster open\n")
    settings: dict[str, Any] = {"cluster_secret_file": str(file)}
    async with running_cluster(model, prefill=settings, decode=settings) as cluster:
        cluster.seals = Seals()
        for _ in range(2):
            request = cluster.request(PROMPT)
            await request.start()
            ticket = await request.ticket()
            assert ticket.first_block == 0
            await request.prefill(ticket)
            await request.finish()
        await cluster.all_free()


def _forged_ticket(cluster: LocalCluster) -> decode_pb2.Ticket:
    layout = cluster.decode.model.layout
    return decode_pb2.Ticket(
        transfer_id=bytes(16),
        attempt=1,
        worker_id="decode",
        epoch=1,
        grpc_address="127.0.0.1:9",
        transport="inproc",
        data_address=NOT_GRANTED,
        num_blocks=1,
        layout=decode_pb2.KvLayout(
            model=layout.model,
            dtype=layout.dtype,
            block_size=layout.block_size,
            num_layers=layout.num_layers,
            num_kv_heads=layout.only_group.num_kv_heads,
            head_dim=layout.only_group.head_dim,
        ),
        lease_s=1.0,
        key=bytes(32),
        layer_groups=1,
        bundle_blocks=1,
        digest="xxh3",
    )


async def test_a_command_on_another_connection_reaches_no_request(cluster: LocalCluster) -> None:
    """Commands carry no MAC: the connection binds them to the start. Fails if sessions are found by their ids."""
    request = cluster.request(PROMPT)
    await request.start()
    ticket = await request.ticket()
    for command in (
        {"stop_choice": decode_pb2.StopChoice(choice_index=0)},
        {"renew_ticket": decode_pb2.RenewTicket(attempt=2)},
        {"prefill_locally": decode_pb2.PrefillLocally(attempt=1)},
    ):
        stranger = cluster.request(PROMPT, request.request_id)
        await stranger.send(**command)
        with pytest.raises(RequestError, match="Send start as its first message"):
            await stranger.event()
        stranger.cancel()
    await request.prefill(ticket)
    assert await request.finish() == await cluster.local(PROMPT)


async def test_silent_connections_close_no_request_that_has_started(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a connection stays a newcomer after a valid start."""
    monkeypatch.setitem(Newcomers.__init__.__kwdefaults__, "max_connections", 2)
    async with running_cluster(model) as cluster:
        request = cluster.request(PROMPT)
        await request.start()
        ticket = await request.ticket()
        silent = [await open_stream(cluster.decode_streams, decode_pb2.DecodeResponse.FromString) for _ in range(3)]
        assert await silent[0].read(DEADLINE_S) is None
        await request.prefill(ticket)
        assert await request.finish() == await cluster.local(PROMPT)
        for stream in silent:
            stream.close()
        await cluster.all_free()
