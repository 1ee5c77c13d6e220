"""TLS towards clients, for HTTP and gRPC. The files are read again when they change."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import grpc

from pdserve.base.errors import SetupError
from pdserve.base.logs import get_logger
from pdserve.peers.replaced_tls import ReplacedContext
from router_svc.config import RouterConfig

log = get_logger(__name__)

#: Interval at which the files are looked at.
_POLL_S = 1.0


class ClientTls:
    """What the listeners of a router need. New connections get the certificate of the time; others keep theirs."""

    def __init__(self, config: RouterConfig, certificate: str) -> None:
        """Raises: OSError, ssl.SSLError: a file cannot be used."""
        key, authorities = config.ssl_keyfile or certificate, config.ssl_ca_certs
        self._verify = ssl.VerifyMode(config.ssl_cert_reqs)
        self._pair = Path(certificate), Path(key)
        self._authorities = None if authorities is None else Path(authorities)
        self._seen = self._state()
        self._grpc = self._read()
        #: For HTTP. It is the same object for as long as the process runs.
        self.context = ReplacedContext(self._make_context())
        is_required = self._verify is ssl.CERT_REQUIRED
        #: For gRPC.
        self.credentials = grpc.dynamic_ssl_server_credentials(
            self._grpc, lambda: self._grpc, require_client_authentication=is_required
        )

    async def run(self) -> None:
        """Follows the files until cancelled."""
        while True:
            await asyncio.sleep(_POLL_S)
            self.refresh()

    def refresh(self) -> None:
        """Reads the files if they have changed. Keeps what it has while they do not fit, as between two writes."""
        if (state := self._state()) == self._seen:
            return
        try:
            context, found = self._make_context(), self._read()
        except (OSError, ssl.SSLError) as error:
            log.warning("certificates_unreadable", reason=error)
            return
        self.context.current, self._grpc, self._seen = context, found, state
        log.info("certificates_reloaded")

    def _make_context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(*self._pair)
        if self._authorities is not None:
            context.load_verify_locations(self._authorities)
        context.verify_mode = self._verify
        return context

    def _read(self) -> grpc.ServerCertificateConfiguration:
        certificate, key = (path.read_bytes() for path in self._pair)
        verifies = self._authorities is not None and self._verify is not ssl.CERT_NONE
        roots = self._authorities.read_bytes() if verifies and self._authorities is not None else None
        return grpc.ssl_server_certificate_configuration([(key, certificate)], roots)

    def _state(self) -> list[tuple[int, int, int] | None]:
        """What differs when a file was written or replaced."""
        paths = [*self._pair, *([] if self._authorities is None else [self._authorities])]
        return [_state_of(path) for path in paths]


def _state_of(path: Path) -> tuple[int, int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns, stat.st_size


def client_tls(config: RouterConfig) -> ClientTls | None:
    """The TLS that the settings describe; None: none. Raises `SetupError`."""
    certificate, key, authorities = config.ssl_certfile, config.ssl_keyfile, config.ssl_ca_certs
    if config.ssl_cert_reqs not in (0, 1, 2):
        raise SetupError(f"--ssl-cert-reqs is {config.ssl_cert_reqs}, but must be 0, 1 or 2.")
    verify = ssl.VerifyMode(config.ssl_cert_reqs)
    if certificate is None:
        if key or authorities or verify is not ssl.CERT_NONE:
            raise SetupError("--ssl-keyfile, --ssl-ca-certs and --ssl-cert-reqs need a certificate: --ssl-certfile.")
        return None
    if verify is not ssl.CERT_NONE and authorities is None:
        raise SetupError(f"--ssl-cert-reqs is {verify.value}, but there is no --ssl-ca-certs to check clients with.")
    try:
        return ClientTls(config, certificate)
    except (OSError, ssl.SSLError) as error:
        raise SetupError(
            f"The certificate {certificate} or its key cannot be used: {error}. Check the --ssl-* flags."
        ) from error
