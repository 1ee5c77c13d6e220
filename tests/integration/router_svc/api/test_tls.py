"""A router with a certificate speaks TLS to clients, over HTTP and gRPC, and asks for theirs if it is to."""

from __future__ import annotations

import asyncio
import socket
import ssl
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest

from pdserve.base.errors import SetupError
from pdserve.cli.private_redis import PrivateRedis
from pdserve.v1 import inference_pb2 as pb
from pdserve.v1 import inference_pb2_grpc
from router_svc.clients.tls import client_tls
from router_svc.config import RouterConfig
from tests.integration.router_svc.conftest import open_cluster
from tests.support.certificates import Authority, TlsSettings
from tests.support.tiny_model import NAME

ONE_OF_EACH = {"prefill-0": "prefill", "decode-0": "decode"}
GENERATE = pb.GenerateRequest(model=NAME, text="Say hello", sampling=pb.ClientSampling(max_tokens=50))


def contents(*paths: Path | str) -> list[bytes]:
    return [Path(path).read_bytes() for path in paths]


async def test_http_and_grpc_speak_tls_and_want_a_clients_certificate(
    redis_server: PrivateRedis, model_dir: Path, tmp_path: Path
) -> None:
    authority = Authority(tmp_path)
    own, client = authority.sign("router"), authority.sign("client")
    settings: dict[str, Any] = {
        "ssl_certfile": own.peer_ssl_certfile,
        "ssl_keyfile": own.peer_ssl_keyfile,
        "ssl_ca_certs": str(authority.certificate),
        "ssl_cert_reqs": 2,
    }
    trusting = ssl.create_default_context(cafile=str(authority.certificate))
    known = ssl.create_default_context(cafile=str(authority.certificate))
    assert client.peer_ssl_certfile is not None
    assert client.peer_ssl_keyfile is not None
    known.load_cert_chain(client.peer_ssl_certfile, client.peer_ssl_keyfile)
    roots, key, chain = contents(authority.certificate, client.peer_ssl_keyfile, client.peer_ssl_certfile)
    async with open_cluster(redis_server, model_dir, ONE_OF_EACH, **settings) as cluster:  # type: ignore[arg-type]
        url = cluster.base_url.replace("http://", "https://") + "/v1/models"
        async with cluster.http.get(url, ssl=known) as response:
            assert response.status == 200
        for refused in (lambda: cluster.http.get(url, ssl=trusting), lambda: cluster.http.get(cluster.base_url)):
            with pytest.raises((aiohttp.ClientError, OSError)):
                async with refused() as response:
                    await response.read()
        for pair, is_known in (((key, chain), True), ((None, None), False)):
            channel_credentials = grpc.ssl_channel_credentials(roots, *pair)
            async with grpc.aio.secure_channel(cluster.grpc_address, channel_credentials) as channel:
                call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(GENERATE)
                if is_known:
                    assert [_ async for _ in call]
                    continue
                with pytest.raises(grpc.aio.AioRpcError):
                    [_ async for _ in call]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"ssl_keyfile": "k"}, "--ssl-certfile"),
        ({"ssl_certfile": "absent.pem"}, "cannot be used"),
        ({"ssl_certfile": "c", "ssl_cert_reqs": 2}, "--ssl-ca-certs"),
        ({"ssl_certfile": "c", "ssl_cert_reqs": 3}, "must be 0, 1 or 2"),
    ],
)
def test_settings_that_would_protect_nothing_stop_the_start(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(SetupError, match=words):
        client_tls(RouterConfig(model=("m",), redis_url="redis://", **settings))


async def test_a_certificate_that_changes_is_in_force_for_new_connections(
    redis_server: PrivateRedis, model_dir: Path, tmp_path: Path
) -> None:
    """Fails when HTTP or gRPC keeps the files of its start, or when a broken pair of files replaces a good one."""
    authority = Authority(tmp_path)
    served = {name: tmp_path / f"served-{name}.pem" for name in ("certfile", "keyfile")}

    def serve(name: str) -> bytes:
        own = authority.sign(name)
        certificate, key = contents(str(own.peer_ssl_certfile), str(own.peer_ssl_keyfile))
        served["certfile"].write_bytes(certificate)
        served["keyfile"].write_bytes(key)
        return ssl.PEM_cert_to_DER_cert(certificate.decode()[: certificate.decode().index("-----END") + 26])

    settings: dict[str, Any] = {f"ssl_{name}": str(path) for name, path in served.items()}
    first = serve("router")
    async with open_cluster(redis_server, model_dir, ONE_OF_EACH, **settings) as cluster:  # type: ignore[arg-type]

        def shown(address: str) -> bytes:
            host, port = address.removeprefix("http://").split(":")
            return ssl.PEM_cert_to_DER_cert(ssl.get_server_certificate((host, int(port))))

        async def both() -> set[bytes]:
            return {await asyncio.to_thread(shown, each) for each in (cluster.base_url, cluster.grpc_address)}

        assert cluster.router._tls is not None
        assert await both() == {first}
        second = serve("renewed")
        cluster.router._tls.refresh()
        assert second != first
        assert await both() == {second}
        served["keyfile"].write_bytes(b"broken")
        cluster.router._tls.refresh()
        assert await both() == {second}


async def test_an_authority_that_was_removed_is_trusted_no_longer(
    redis_server: PrivateRedis, model_dir: Path, tmp_path: Path
) -> None:
    """HTTP went on trusting it: a context that loads its file again still has what was in it before."""
    old, new = Authority(tmp_path / "old"), Authority(tmp_path / "new")
    own, trusted = old.sign("router"), tmp_path / "trusted.pem"
    trusted.write_bytes(old.certificate.read_bytes())
    settings: dict[str, Any] = {
        "ssl_certfile": own.peer_ssl_certfile,
        "ssl_keyfile": own.peer_ssl_keyfile,
        "ssl_ca_certs": str(trusted),
        "ssl_cert_reqs": 2,
        "admin_port": 0,
    }
    clients = {each: each.sign("client") for each in (old, new)}
    async with open_cluster(redis_server, model_dir, ONE_OF_EACH, **settings) as cluster:  # type: ignore[arg-type]
        urls = [url.replace("http://", "https://") + "/livez" for url in (cluster.base_url, cluster.admin_url)]

        async def answers(client: TlsSettings) -> list[bool]:
            """Of HTTP, the admin port and gRPC, over new connections."""
            context = ssl.create_default_context(cafile=str(old.certificate))
            context.load_cert_chain(str(client.peer_ssl_certfile), client.peer_ssl_keyfile)
            found = []
            for url in urls:
                try:
                    async with aiohttp.ClientSession() as http, http.get(url, ssl=context) as response:
                        found.append(response.status == 200)
                except (aiohttp.ClientError, OSError):
                    found.append(False)
            key, chain = contents(str(client.peer_ssl_keyfile), str(client.peer_ssl_certfile))
            pair = grpc.ssl_channel_credentials(old.certificate.read_bytes(), key, chain)
            async with grpc.aio.secure_channel(cluster.grpc_address, pair) as channel:
                try:
                    call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(GENERATE)
                    return [*found, bool([_ async for _ in call])]
                except grpc.aio.AioRpcError:
                    return [*found, False]

        context = ssl.create_default_context(cafile=str(old.certificate))
        context.load_cert_chain(str(clients[old].peer_ssl_certfile), clients[old].peer_ssl_keyfile)
        context.maximum_version = ssl.TLSVersion.TLSv1_2  # Sessions are there when a handshake is over.
        context.set_alpn_protocols(["h2", "http/1.1"])

        def shaken(url: str, session: ssl.SSLSession | None) -> tuple[ssl.SSLSession | None, bool]:
            """The session of a connection, and whether that is the one that was given."""
            host, port = url.removeprefix("https://").removesuffix("/livez").split(":")
            with (
                socket.create_connection((host, int(port))) as plain,
                context.wrap_socket(plain, server_hostname=host, session=session) as connection,
            ):
                return connection.session, bool(connection.session_reused)

        assert cluster.router._tls is not None
        assert [await answers(clients[each]) for each in (old, new)] == [[True] * 3, [False] * 3]
        everywhere = [*urls, cluster.grpc_address]
        sessions = [(await asyncio.to_thread(shaken, url, None))[0] for url in everywhere]
        assert (await asyncio.to_thread(shaken, urls[0], sessions[0]))[1], "sessions of HTTP can be resumed"
        trusted.write_bytes(new.certificate.read_bytes() + b"\n")
        cluster.router._tls.refresh()
        assert [await answers(clients[each]) for each in (old, new)] == [[False] * 3, [True] * 3]
        for url, session in zip(everywhere, sessions, strict=True):
            with pytest.raises(OSError, match=r"alert|reset|EOF|closed"):
                await asyncio.to_thread(shaken, url, session)
