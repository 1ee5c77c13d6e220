"""TLS between routers and workers: who has no certificate of the cluster's CA gets no word, and certificates change."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from pdserve.base.errors import PdserveError, SetupError
from pdserve.net import rpc
from pdserve.net.stream_server import serve_streams
from pdserve.net.streams import MessageStream, open_stream
from pdserve.peers.peer_tls import PeerTls, peer_tls
from pdserve.v1 import decode_pb2 as pb
from pdserve.v1 import decode_pb2_grpc as pb_grpc
from router_svc.routing import stream_pool
from router_svc.routing.stream_pool import StreamPool
from tests.integration.services.local_cluster import running_cluster
from tests.support.certificates import Authority, TlsSettings, credentials
from tests.unit.model.tiny import save_model

PROMPT = [(7 * position) % 90 + 3 for position in range(45)]
TIMEOUT_S = 20.0
#: The first byte of an alert in TLS.
_ALERT = 0x15


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ours")


@pytest.fixture
def other(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "others")


class _Committing(pb_grpc.DecodeServiceServicer):
    @rpc.method
    async def Commit(self, request: pb.CommitRequest, context: Any) -> pb.CommitResponse:  # noqa: N802
        return pb.CommitResponse(receive_s=1.0)


@asynccontextmanager
async def serving(tls: PeerTls) -> AsyncIterator[tuple[str, str]]:
    """A gRPC port, and a stream port that answers each message with a failure of that name."""

    async def handle(stream: MessageStream[pb.DecodeRequest]) -> None:
        while await stream.read() is not None:
            await stream.write(pb.DecodeResponse(started=pb.DecodeStarted(cached_tokens=7)))

    def failure(error: PdserveError) -> pb.DecodeResponse:
        return pb.DecodeResponse()

    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    port = rpc.GrpcPort(host="127.0.0.1", port=0, flag="--grpc-port", credentials=tls.server_credentials())
    async with (
        serve_streams(listener, pb.DecodeRequest.FromString, handle, failure, tls) as streams,
        rpc.serve_grpc_at(
            lambda server: pb_grpc.add_DecodeServiceServicer_to_server(_Committing(), server), [], port, grace_s=0
        ) as (address, _),
    ):
        yield address, streams


async def call(address: str, tls: PeerTls | None) -> float:
    """The answer of the gRPC port. Raises: AioRpcError."""
    async with rpc.open_channel(address, tls) as channel:
        answer = await pb_grpc.DecodeServiceStub(channel).Commit(pb.CommitRequest(), timeout=TIMEOUT_S)
    return float(answer.receive_s)


async def talk(address: str, tls: PeerTls | None) -> int | None:
    """The answer of the stream port; None: it closed the connection. Raises: OSError."""
    stream = await open_stream(address, pb.DecodeResponse.FromString, tls)
    try:
        await stream.write(pb.DecodeRequest(keep_lease=pb.KeepLease()))
        answer = await stream.read(TIMEOUT_S)
        return None if answer is None else answer.started.cached_tokens
    finally:
        stream.close()


async def refused(address: str, streams: str, tls: PeerTls | None) -> bool:
    """Whether neither port answers."""
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await call(address, tls)
    assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
    try:
        return await talk(streams, tls) is None
    except OSError:
        return True


async def test_peers_of_one_authority_talk_and_others_are_refused(authority: Authority, other: Authority) -> None:
    async with serving(credentials(authority, "worker")) as (address, streams):
        ours = credentials(authority, "router")
        assert await call(address, ours) == 1.0
        assert await talk(streams, ours) == 7
        assert await refused(address, streams, None)
        assert await refused(address, streams, credentials(other))
        # Trusts the worker, but shows a certificate of another authority.
        foreign = replace(other.sign("mixed"), peer_ssl_ca_certs=str(authority.certificate))
        assert await refused(address, streams, PeerTls(foreign))


async def test_a_worker_at_another_address_is_not_the_one_that_was_called(authority: Authority) -> None:
    elsewhere = PeerTls(authority.sign("worker", "IP:192.0.2.9"))
    async with serving(elsewhere) as (address, streams):
        assert await refused(address, streams, credentials(authority, "router"))


async def test_all_workers_may_have_one_name(authority: Authority) -> None:
    named = PeerTls(authority.sign("worker", "DNS:worker.pdserve"))
    router = PeerTls(replace(authority.sign("router"), peer_ssl_server_name="worker.pdserve"))
    async with serving(named) as (address, streams):
        assert await call(address, router) == 1.0
        assert await talk(streams, router) == 7


async def test_changed_certificates_are_used_without_a_restart(authority: Authority, other: Authority) -> None:
    """First another CA is trusted too, then the worker gets a certificate of it, while a connection stays open."""
    worker = credentials(authority, "worker")
    async with serving(worker) as (address, streams):
        before = credentials(authority, "router")
        kept = await open_stream(streams, pb.DecodeResponse.FromString, before)
        after = credentials(other, "router")
        files = authority.sign("worker")
        assert worker.generation == 0
        both = authority.certificate.read_bytes() + other.certificate.read_bytes()
        theirs = other.sign("worker")
        for source, target in zip(_paths(theirs)[:2], _paths(files)[:2], strict=True):
            target.write_bytes(source.read_bytes())
        authority.certificate.write_bytes(both)
        worker.refresh()
        assert worker.generation == 1
        assert await call(address, after) == 1.0
        assert await talk(streams, after) == 7
        await kept.write(pb.DecodeRequest(keep_lease=pb.KeepLease()))
        assert (await kept.read(TIMEOUT_S)) is not None
        kept.close()


async def test_an_authority_that_was_removed_is_trusted_no_longer(authority: Authority, other: Authority) -> None:
    """A context that loads its file again still trusts what was in it before."""
    both = authority.certificate.read_bytes() + other.certificate.read_bytes()
    ours, alone = authority.certificate, authority.certificate.read_bytes()
    theirs = PeerTls(replace(other.sign("router"), peer_ssl_ca_certs=str(ours)))
    ours.write_bytes(both)
    worker = credentials(authority, "worker")
    async with serving(worker) as (address, streams):
        assert await call(address, theirs) == 1.0
        assert await talk(streams, theirs) == 7
        ours.write_bytes(alone)
        worker.refresh()
        assert worker.generation == 1
        assert await refused(address, streams, theirs)
        assert await talk(streams, credentials(authority, "router")) == 7


async def test_half_written_certificates_change_nothing(authority: Authority) -> None:
    worker = credentials(authority, "worker")
    router = credentials(authority, "router")
    settings = authority.sign("other")
    async with serving(worker) as (address, streams):
        # A key that does not fit the certificate.
        (authority.directory / "worker-key.pem").write_bytes(_paths(settings)[1].read_bytes())
        worker.refresh()
        assert worker.generation == 0
        assert await call(address, router) == 1.0
        assert await talk(streams, router) == 7
        (authority.directory / "worker.pem").write_bytes(_paths(settings)[0].read_bytes())
        worker.refresh()
        assert worker.generation == 1
        assert await talk(streams, router) == 7


async def test_a_connection_that_speaks_no_tls_holds_no_request(authority: Authority) -> None:
    async with serving(credentials(authority, "worker")) as (_, streams):
        host, _, port = streams.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"\x00\x00\x00\x02\x22\x00")
        async with asyncio.timeout(TIMEOUT_S):
            answer = await reader.read()
        assert not answer or answer[0] == _ALERT
        writer.close()


def test_incomplete_or_wrong_files_are_refused_at_start(authority: Authority, tmp_path: Path) -> None:
    settings = authority.sign("worker")
    assert peer_tls(TlsSettings(peer_ssl_certfile=None, peer_ssl_keyfile=None, peer_ssl_ca_certs=None)) is None
    with pytest.raises(SetupError, match="all of --peer-ssl-certfile"):
        peer_tls(replace(settings, peer_ssl_ca_certs=None))
    for change in ({"peer_ssl_keyfile": str(tmp_path / "absent")}, {"peer_ssl_keyfile": settings.peer_ssl_certfile}):
        with pytest.raises(SetupError, match="Cannot read the certificates"):
            peer_tls(replace(settings, **change))
    contexts = credentials(authority)._contexts()
    assert {context.minimum_version for context in contexts} == {ssl.TLSVersion.TLSv1_3}


async def test_a_handover_over_tls_gives_the_same_tokens(
    authority: Authority, tmp_path_factory: pytest.TempPathFactory
) -> None:
    model = save_model(tmp_path_factory.mktemp("tiny"))
    files = {name: value for name, value in asdict(authority.sign("worker")).items() if value}
    async with running_cluster(model, prefill=files, decode=files) as cluster:
        request = cluster.request(PROMPT)
        await request.start()
        await request.prefill(await request.ticket())
        assert await request.finish() == await cluster.local(PROMPT)
        await cluster.all_free()


def _paths(settings: TlsSettings) -> list[Path]:
    named = (settings.peer_ssl_certfile, settings.peer_ssl_keyfile, settings.peer_ssl_ca_certs)
    return [Path(path) for path in named if path is not None]


@asynccontextmanager
async def pool_of(tls: PeerTls) -> AsyncIterator[StreamPool[pb.DecodeResponse]]:
    pool = StreamPool(pb.DecodeResponse.FromString, tls)
    async with asyncio.timeout(TIMEOUT_S):
        running = asyncio.create_task(pool.run())
        try:
            yield pool
        finally:
            running.cancel()
            await asyncio.wait([running])


async def _answered(stream: MessageStream[pb.DecodeResponse]) -> bool:
    await stream.write(pb.DecodeRequest(keep_lease=pb.KeepLease()))
    return await stream.read() is not None


async def _spare(pool: StreamPool[pb.DecodeResponse], address: str) -> MessageStream[pb.DecodeResponse]:
    while not pool._spare.get(address):  # noqa: ASYNC110 - there is no event for it
        await asyncio.sleep(0.001)
    return pool._spare[address][0][1]


async def test_the_next_request_finds_a_connection_whose_handshake_is_over(authority: Authority) -> None:
    tls = credentials(authority)
    async with serving(tls) as (_, address), pool_of(tls) as pool:
        first = await pool.open(address)
        spare = await _spare(pool, address)
        second = await pool.open(address)
        assert second is spare
        assert await _answered(first)
        assert await _answered(second)
        first.close()
        second.close()


async def test_an_address_that_no_name_can_have_ends_no_pool(authority: Authority) -> None:
    """Python raises `UnicodeError` for it, which ended the router that opens connections ahead of requests."""
    tls = credentials(authority)
    async with serving(tls) as (_, address), pool_of(tls) as pool:
        for wrong in ("a..b:7001", "a" * 64 + ":7001"):
            with pytest.raises(OSError, match="is no address"):
                await pool.open(wrong)
        (await pool.open(address)).close()
        await _spare(pool, address)


async def test_a_spare_connection_that_is_old_or_closed_by_the_worker_serves_no_request(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    tls = credentials(authority)
    async with pool_of(tls) as pool:
        async with serving(tls) as (_, address):
            (await pool.open(address)).close()
            old = await _spare(pool, address)
            monkeypatch.setattr(stream_pool, "_MAX_AGE_S", 0.0)
            fresh = await pool.open(address)
            assert fresh is not old
            assert not old.is_open
            monkeypatch.setattr(stream_pool, "_MAX_AGE_S", 60.0)
            fresh.close()
            last = await _spare(pool, address)
        assert await last.read() is None
        with pytest.raises(OSError):
            await pool.open(address)
