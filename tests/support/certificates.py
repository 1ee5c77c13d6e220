"""Certificates for tests: an authority, and what it signs."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from pdserve.peers.peer_tls import PeerTls


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsSettings:
    """Implements `PeerTlsConfig`."""

    peer_ssl_certfile: str | None
    peer_ssl_keyfile: str | None
    peer_ssl_ca_certs: str | None
    peer_ssl_server_name: str | None = None


class Authority:
    """A CA in a directory of its own. Skips the test without openssl."""

    def __init__(self, directory: Path) -> None:
        if shutil.which("openssl") is None:
            pytest.skip("no openssl to make certificates with")
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.certificate, self._key = directory / "ca.pem", directory / "ca-key.pem"
        self._request(self._key, "-x509", "-subj", "/CN=ca", "-days", "1", "-out", str(self.certificate))

    def sign(self, name: str, alternative: str = "IP:127.0.0.1") -> TlsSettings:
        """A process's certificate, in files of this name that are replaced."""
        certificate, key, request = (self.directory / f"{name}{end}" for end in (".pem", "-key.pem", ".csr"))
        self._request(key, "-subj", f"/CN={name}", "-addext", f"subjectAltName={alternative}", "-out", str(request))
        _openssl("x509", "-req", "-in", request, "-CA", self.certificate, "-CAkey", self._key, "-days", "1",
                 "-copy_extensions", "copy", "-out", certificate)  # fmt: skip
        return TlsSettings(
            peer_ssl_certfile=str(certificate), peer_ssl_keyfile=str(key), peer_ssl_ca_certs=str(self.certificate)
        )

    def _request(self, key: Path, *arguments: str) -> None:
        curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
        _openssl("req", *curve, "-keyout", key, *arguments)


def credentials(authority: Authority, name: str = "peer") -> PeerTls:
    """Those of a process with a certificate of its own."""
    return PeerTls(authority.sign(name))


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)
