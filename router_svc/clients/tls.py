"""TLS towards clients, for HTTP and gRPC. The files are read once, when the router starts."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from pdserve.base.errors import SetupError
from router_svc.config import RouterConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientTls:
    """What the listeners of a router need."""

    context: ssl.SSLContext
    credentials: grpc.ServerCredentials


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
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key)
        if authorities is not None:
            context.load_verify_locations(authorities)
        pair = (Path(key or certificate).read_bytes(), Path(certificate).read_bytes())
        roots = None if authorities is None or verify is ssl.CERT_NONE else Path(authorities).read_bytes()
    except (OSError, ssl.SSLError) as error:
        raise SetupError(
            f"The certificate {certificate} or its key cannot be used: {error}. Check the --ssl-* flags."
        ) from error
    context.verify_mode = verify
    required = verify is ssl.CERT_REQUIRED
    return ClientTls(context=context, credentials=grpc.ssl_server_credentials([pair], roots, required))
