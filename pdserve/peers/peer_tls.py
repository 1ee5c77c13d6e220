"""TLS between routers and workers, on gRPC and stream ports: certificates are read again when their files change."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import grpc

from pdserve.base.errors import SetupError
from pdserve.base.logs import get_logger
from pdserve.peers.replaced_tls import ReplacedContext

log = get_logger(__name__)

#: Interval at which the files are looked at.
_POLL_S = 2.0
_FLAGS = "--peer-ssl-certfile, --peer-ssl-keyfile and --peer-ssl-ca-certs"


class PeerTlsConfig(Protocol):
    """The settings of TLS between peers."""

    @property
    def peer_ssl_certfile(self) -> str | None:
        """This process's certificate, with those between it and the CA."""

    @property
    def peer_ssl_keyfile(self) -> str | None:
        """The private key of this process."""

    @property
    def peer_ssl_ca_certs(self) -> str | None:
        """Certificates of the CAs that peers have theirs from."""

    @property
    def peer_ssl_server_name(self) -> str | None:
        """The name in the certificates of workers; None: their addresses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Files:
    """Contents of the three files, in PEM."""

    certificate: bytes
    key: bytes
    authorities: bytes


class PeerTls:
    """Credentials of one process, which are those of a client and of a server. Belongs to the event loop.

    Both sides present a certificate and verify that of the other.
    """

    def __init__(self, config: PeerTlsConfig) -> None:
        """Raises: SetupError when a file is missing, or certificate and key do not fit."""
        named = (config.peer_ssl_certfile, config.peer_ssl_keyfile, config.peer_ssl_ca_certs)
        if any(path is None for path in named):
            raise SetupError(f"TLS between routers and workers needs all of {_FLAGS}. Set the missing ones.")
        self._paths = [Path(path) for path in named if path is not None]
        self.server_name = config.peer_ssl_server_name
        #: Number of times that changed files were read. An open connection keeps the certificates it was opened with.
        self.generation = 0
        self._seen = self._state()
        try:
            self._files = self._read()
            self._client, server = self._contexts()
        except (OSError, ssl.SSLError) as error:
            raise SetupError(f"Cannot read the certificates of {_FLAGS}: {error}.") from error
        self._server = ReplacedContext(server)

    @property
    def client_context(self) -> ssl.SSLContext:
        """For connections to a stream port."""
        return self._client

    @property
    def server_context(self) -> ssl.SSLContext:
        """For a stream port. It is the same object for as long as the process runs."""
        return self._server

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """For a channel to a peer, from the files as they are now."""
        files = self._files
        return grpc.ssl_channel_credentials(files.authorities, files.key, files.certificate)

    def channel_options(self) -> list[tuple[str, str]]:
        """Options of a channel to a peer."""
        return [] if self.server_name is None else [("grpc.ssl_target_name_override", self.server_name)]

    def server_credentials(self) -> grpc.ServerCredentials:
        """For a gRPC server: each connection gets the certificates of that time."""
        return grpc.dynamic_ssl_server_credentials(
            self._grpc_configuration(), self._grpc_configuration, require_client_authentication=True
        )

    async def run(self) -> None:
        """Reads the files again when they have changed, until cancelled."""
        while True:
            await asyncio.sleep(_POLL_S)
            self.refresh()

    def refresh(self) -> None:
        """Reads the files if they have changed. Keeps the former ones if they do not fit, as between two writes."""
        state = self._state()
        if state == self._seen:
            return
        try:
            client, server = self._contexts()
            files = self._read()
        except (OSError, ssl.SSLError) as error:
            log.warning("peer_certificates_unreadable", reason=error)
            return
        self._client, self._server.current, self._files, self._seen = client, server, files, state
        self.generation += 1
        log.info("peer_certificates_reloaded", generation=self.generation)

    def _grpc_configuration(self) -> grpc.ServerCertificateConfiguration:
        files = self._files
        return grpc.ssl_server_certificate_configuration([(files.key, files.certificate)], files.authorities)

    def _contexts(self) -> tuple[ssl.SSLContext, ssl.SSLContext]:
        """TLS contexts of a client and of a server."""
        client, server = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        for context in (client, server):
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_cert_chain(self._paths[0], self._paths[1])
            context.load_verify_locations(self._paths[2])
        server.num_tickets = 0  # Nobody resumes a session, and tickets cost a tenth of a handshake.
        return client, server

    def _read(self) -> _Files:
        certificate, key, authorities = (path.read_bytes() for path in self._paths)
        return _Files(certificate=certificate, key=key, authorities=authorities)

    def _state(self) -> Sequence[tuple[int, int, int] | None]:
        """What differs when a file was written or replaced."""
        return [_state_of(path) for path in self._paths]


def peer_tls(config: PeerTlsConfig) -> PeerTls | None:
    """The credentials of a process; None: it speaks no TLS with its peers. Raises: SetupError."""
    named = (config.peer_ssl_certfile, config.peer_ssl_keyfile, config.peer_ssl_ca_certs)
    return PeerTls(config) if any(named) else None


def _state_of(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size
