"""UCX listens once a worker needs it: one that shares no memory with the decode worker asks for the address."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvtransfer.handover.ticket import ticket_from_proto
from kvtransfer.transport import open_transport
from kvtransfer.transport.local.socket_directory import SocketDirectory
from kvtransfer.transport.own_sockets import tcp_sockets
from kvtransfer.transport.with_local import WithLocal
from pdserve.base.errors import PeerRefused, RequestError, SetupError
from pdserve.net.rpc import mapped_rpc_errors
from pdserve.peers.seals import Purpose, Seals
from pdserve.peers.secret import parse_secret
from pdserve.peers.tcp_filter import filter_refusal
from pdserve.v1 import decode_pb2, decode_pb2_grpc
from tests.integration.services.local_cluster import LocalCluster, RouterRequest, running_cluster
from tests.unit.model.tiny import save_model

PROMPT = [(7 * position) % 90 + 3 for position in range(45)]
#: Prefill and decode workers: of one host, and of two.
ONE_DIRECTORY, TWO_DIRECTORIES = ("both", "both"), ("one", "another")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def directory() -> Iterator[Path]:
    """Where sockets are: the path of one is short."""
    with tempfile.TemporaryDirectory(dir="/tmp") as path:
        yield Path(path)


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    file = tmp_path / "secret"
    file.write_text("the-secret-of-this-cluster\n")
    return file


@asynccontextmanager
async def _open(
    model: Path, directory: Path, directories: tuple[str, str], *, guarded: bool = False, **settings: Any
) -> AsyncIterator[LocalCluster]:
    """Workers that are not in one directory take each other for workers of other hosts."""
    transports = []
    for name in directories:
        sockets = SocketDirectory(directory / name)
        transport = open_transport("ucx", guarded=guarded, local_sockets=sockets)
        assert isinstance(transport, WithLocal)
        await transport.prepare()
        transports.append(transport)
    prefill, decode = transports
    running = running_cluster(
        model, prefill_transport=prefill, decode_transport=decode, prefill=settings, decode=settings
    )
    async with running as cluster:
        yield cluster
        await cluster.all_free()


def _listening(cluster: LocalCluster) -> set[str]:
    """The tiers of the workers that listen at a port."""
    found, listening = set(), {each.local for each in tcp_sockets().values() if each.listens}
    for worker in (cluster.prefill, cluster.decode):
        assert isinstance(worker.transport, WithLocal)
        assert worker.transport.listens == bool(worker.transport.guard.addresses & listening)
        found |= {worker.tier} if worker.transport.listens else set()
    return found


async def _handed_over(cluster: LocalCluster, request: RouterRequest) -> decode_pb2.Ticket:
    ticket = await request.ticket()
    await request.prefill(ticket)
    assert await request.finish() == await cluster.local(request.prompt)
    return ticket


async def test_workers_that_share_memory_open_no_port(model: Path, directory: Path) -> None:
    async with _open(model, directory, ONE_DIRECTORY) as cluster:
        for first in range(3):
            request = cluster.request([first, *PROMPT])
            await request.start()
            ticket = await _handed_over(cluster, request)
            assert not ticket.data_address
            # They say all the same what UCX could use.
            assert {"tcp", "self"} <= set(ticket.data_endpoint.lanes)
        assert _listening(cluster) == set()


@pytest.mark.parametrize(
    "guarded",
    [
        False,
        pytest.param(True, marks=pytest.mark.skipif(bool(filter_refusal()), reason="the kernel refuses filters")),
    ],
)
async def test_a_worker_that_shares_no_memory_asks_once_and_has_the_port_opened(
    model: Path, directory: Path, secret: Path, guarded: bool
) -> None:
    """Later tickets have the address. A guarded port lets the sender's connection in."""
    settings = {"cluster_secret_file": str(secret)}
    async with _open(model, directory, TWO_DIRECTORIES, guarded=guarded, **settings) as cluster:
        addresses = []
        for first in range(3):
            request = cluster.request([first, *PROMPT])
            await request.start()
            addresses.append((await _handed_over(cluster, request)).data_address)
        assert addresses[0] == b""
        assert addresses[1] == addresses[2] != b""
        assert _listening(cluster) == {"prefill", "decode"}


async def test_a_worker_that_would_not_ask_gets_the_address(model: Path, directory: Path) -> None:
    """As one of the last release."""
    async with _open(model, directory, TWO_DIRECTORIES) as cluster:
        request = cluster.request(PROMPT)
        await request.start(senders_ask=False)
        assert (await _handed_over(cluster, request)).data_address
        assert _listening(cluster) == {"prefill", "decode"}


async def test_a_renewed_ticket_has_no_address_either(model: Path, directory: Path) -> None:
    async with _open(model, directory, ONE_DIRECTORY) as cluster:
        request = cluster.request(PROMPT)
        await request.start()
        assert not (await request.ticket()).data_address
        await request.send(renew_ticket=decode_pb2.RenewTicket(attempt=2))
        assert not (await _handed_over(cluster, request)).data_address
        assert _listening(cluster) == set()


async def test_strangers_get_no_address_and_open_no_port(model: Path, directory: Path, secret: Path) -> None:
    strangers = Seals(), Seals(parse_secret("the-secret-of-another-cluster", where="test"))
    async with _open(model, directory, ONE_DIRECTORY, cluster_secret_file=str(secret)) as cluster:
        stub = decode_pb2_grpc.DecodeServiceStub(cluster.decode_channel)
        for stranger in strangers:
            message = decode_pb2.GetDataAddressRequest(nonce=bytes(16))
            sealed = stranger.seal(Purpose.ADDRESS_REQUEST, cluster.decode.seal_name, message)
            with pytest.raises(PeerRefused), mapped_rpc_errors("the decode worker"):
                await stub.GetDataAddress(sealed)
        assert _listening(cluster) == set()


async def test_an_answer_of_another_process_is_refused(
    model: Path, directory: Path, secret: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took over the address of a worker that ended. Fails if the sender connects to where a stranger says."""

    async def forged(worker: object, request: decode_pb2.GetDataAddressRequest) -> decode_pb2.GetDataAddressResponse:
        return decode_pb2.GetDataAddressResponse(data_address=b"\xff" * 64)

    monkeypatch.setattr("decode_svc.service.answer_data_address", forged)
    async with _open(model, directory, TWO_DIRECTORIES, cluster_secret_file=str(secret)) as cluster:
        request = cluster.request(PROMPT)
        await request.start()
        with pytest.raises(PeerRefused):
            await request.prefill(await request.ticket())
        request.cancel()
        assert _listening(cluster) == set()


async def test_a_question_that_no_worker_asks_is_refused_by_name(model: Path, directory: Path) -> None:
    async with _open(model, directory, ONE_DIRECTORY) as cluster:
        stub = decode_pb2_grpc.DecodeServiceStub(cluster.decode_channel)
        with pytest.raises(RequestError, match="the nonce has 3 bytes, not 16"), mapped_rpc_errors("the decode worker"):
            await stub.GetDataAddress(decode_pb2.GetDataAddressRequest(nonce=b"abc"))


async def test_a_port_that_cannot_be_opened_costs_the_transfer_and_not_the_request(
    model: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with _open(model, directory, TWO_DIRECTORIES) as cluster:
        transport = cluster.decode.transport

        async def listen() -> bytes:
            raise SetupError("UCX does not start.")

        monkeypatch.setattr(transport, "listen", listen)
        request = cluster.request(PROMPT)
        await request.start()
        ticket = await request.ticket()
        with pytest.raises(SetupError, match=r"UCX does not start\."):
            await request.prefill(ticket)
        await request.send(prefill_locally=decode_pb2.PrefillLocally(attempt=2))
        assert await request.finish() == await cluster.local(PROMPT)


async def test_a_ticket_without_an_address_is_one_that_a_worker_reads(model: Path, directory: Path) -> None:
    async with _open(model, directory, ONE_DIRECTORY) as cluster:
        request = cluster.request(PROMPT)
        await request.start()
        assert ticket_from_proto(await request.ticket()).data_address == b""
        request.cancel()
