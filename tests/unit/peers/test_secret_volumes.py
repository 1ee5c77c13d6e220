"""Files in a volume of Kubernetes: a link that is replaced, so that all of them change at once, is seen as a change."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from pathlib import Path

import pytest

from pdserve.base.errors import Unauthorized
from pdserve.cli.cluster_secrets.certificates import peer_certificates
from pdserve.peers.peer_tls import PeerTls
from router_svc.clients.access import Access
from tests.support.certificates import TlsSettings

NOW = datetime.now(UTC)


class Volume:
    """A directory as the kubelet keeps it: names link to `..data`, which links to the files of a version."""

    def __init__(self, path: Path, files: dict[str, bytes]) -> None:
        self.path, self._version = path, 0
        self.path.mkdir()
        self.replace(files)
        for name in files:
            (path / name).symlink_to(f"..data/{name}")

    def replace(self, files: dict[str, bytes]) -> None:
        """Another version of the Secret."""
        self._version += 1
        folder = self.path / f"..{self._version}"
        folder.mkdir()
        for name, content in files.items():
            (folder / name).write_bytes(content)
        (self.path / "..new").symlink_to(folder.name)
        (self.path / "..new").rename(self.path / "..data")


def certificates() -> dict[str, bytes]:
    made = peer_certificates(NOW)
    return {"peer-ca.pem": made.authority, "peer.pem": made.certificate, "peer-key.pem": made.key}


def keys(key: str) -> dict[str, bytes]:
    digest = hashlib.sha256(key.encode()).hexdigest()
    return {"api-keys.toml": f'[[keys]]\nid = "a"\nsha256 = "{digest}"\n'.encode()}


def test_a_changed_secret_brings_new_certificates(tmp_path: Path) -> None:
    """Fails if the times and numbers of links are looked at instead of those of files."""
    volume = Volume(tmp_path / "peer", certificates())
    settings = TlsSettings(
        peer_ssl_certfile=str(volume.path / "peer.pem"),
        peer_ssl_keyfile=str(volume.path / "peer-key.pem"),
        peer_ssl_ca_certs=str(volume.path / "peer-ca.pem"),
    )
    tls = PeerTls(settings)
    tls.refresh()
    assert tls.generation == 0
    volume.replace(certificates())
    tls.refresh()
    assert tls.generation == 1


def test_a_changed_secret_brings_new_keys(tmp_path: Path) -> None:
    volume = Volume(tmp_path / "secrets", keys("old"))
    access = Access(path=volume.path / "api-keys.toml")
    volume.replace(keys("new"))
    access.refresh()
    assert access.client(["new"], "").id == "a"
    with pytest.raises(Unauthorized):
        access.client(["old"], "")
