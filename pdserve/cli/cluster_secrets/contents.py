"""Everything that keeps strangers out of a cluster, as files by name."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from pdserve.cli.cluster_secrets.certificates import peer_certificates
from pdserve.peers.secret import new_secret

CLUSTER_SECRET = "cluster-secret"
REDIS_PASSWORD, STATE_PASSWORD = "redis-password", "state-password"
API_KEYS = "api-keys.toml"
METRICS_KEY, SMOKE_TEST_KEY = "metrics-key", "smoke-test-key"
PEER_CA, PEER_CERTIFICATE, PEER_KEY = "peer-ca.pem", "peer.pem", "peer-key.pem"

#: Who reads a file, as the directory that has it under `--by-reader`. The router has what clients could need, too.
READERS: Mapping[str, str] = {
    CLUSTER_SECRET: "peers",
    PEER_CA: "peers",
    PEER_CERTIFICATE: "peers",
    PEER_KEY: "peers",
    REDIS_PASSWORD: "redis",
    STATE_PASSWORD: "state",
    API_KEYS: "router",
    SMOKE_TEST_KEY: "router",
    METRICS_KEY: "metrics",
}

#: Ends the name of the Secret with the password of the state's Redis.
STATE_SUFFIX = "-state"

_FIRST = "first"
_HEADER = "# API keys as SHA-256 digests (docs/operations/keys.md). The router reads a changed file within a second.\n"


#: Enough for the Job and its repetitions. Who takes this key from its pod cannot use the cluster with it.
_SMOKE_TEST_LIMITS = ("requests_per_minute = 12", "tokens_per_minute = 4096", "parallel = 2")


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretGroup:
    """Files that belong together: all of them are made, or none."""

    #: Contents by name. A group is complete when its last file is there.
    files: Mapping[str, bytes]
    #: An API key that is shown once and in no file; None: the group has none.
    api_key: str | None = None
    #: What follows the name of the cluster's Secret in the name of the one that has these files in Kubernetes.
    secret_suffix: str = ""


def new_secrets(now: datetime) -> tuple[SecretGroup, ...]:
    """All secrets of a cluster, new and random. `now` has a time zone."""
    return (
        SecretGroup(files={CLUSTER_SECRET: _line(new_secret())}),
        SecretGroup(files={REDIS_PASSWORD: _line(new_secret())}),
        # Secrets of clusters that had no store of responses yet stay as they are.
        SecretGroup(files={STATE_PASSWORD: _line(new_secret())}, secret_suffix=STATE_SUFFIX),
        SecretGroup(files=_peer_files(now)),
        _api_keys(),
    )


def _peer_files(now: datetime) -> dict[str, bytes]:
    made = peer_certificates(now)
    return {PEER_CA: made.authority, PEER_KEY: made.key, PEER_CERTIFICATE: made.certificate}


def _api_keys() -> SecretGroup:
    """The operator's key, which is in no file; one for Prometheus, and one for the smoke test of Kubernetes."""
    first, metrics, smoke_test = (secrets.token_urlsafe(32) for _ in range(3))
    table = "\n".join(
        [
            _HEADER,
            key_table(_FIRST, first, "admin = true"),
            key_table("metrics", metrics, "metrics = true"),
            key_table("smoke-test", smoke_test, *_SMOKE_TEST_LIMITS),
        ]
    )
    files = {METRICS_KEY: metrics.encode(), SMOKE_TEST_KEY: smoke_test.encode(), API_KEYS: table.encode()}
    return SecretGroup(files=files, api_key=first)


def key_table(name: str, key: str, *settings: str) -> str:
    """A key's table for the file of keys, with its digest and these lines."""
    digest = hashlib.sha256(key.encode()).hexdigest()
    return "\n".join(["[[keys]]", f'id = "{name}"', f'sha256 = "{digest}"', *settings, ""])


def _line(text: str) -> bytes:
    return f"{text}\n".encode()
