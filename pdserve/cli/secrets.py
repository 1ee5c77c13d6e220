"""`pdserve secrets`: makes what keeps strangers out of a cluster, and shows the first API key once."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from pdserve.base.config import load, option
from pdserve.base.errors import SetupError
from pdserve.cli.cluster_secrets.contents import STATE_SUFFIX, SecretGroup, new_secrets
from pdserve.cli.cluster_secrets.directory import write_missing
from pdserve.cli.cluster_secrets.kubernetes import SERVICE_ACCOUNT, ApiServer, api_server


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretsConfig:
    """Settings of `pdserve secrets`."""

    to: str | None = option(None, help="directory to write them to; what is there stays as it is", metavar="DIR")
    kubernetes_secret: str | None = option(
        None,
        help="Secret to make, with NAME-state for the store of responses, in a pod of Kubernetes; one that is there "
        "stays as it is",
        metavar="NAME",
    )
    by_reader: bool = option(
        False, help="with --to: a directory in it for each kind of reader: metrics, peers, redis, router, state"
    )
    service_account: str = option(
        str(SERVICE_ACCOUNT), help="where that pod has its token, its namespace and the API server's CA", metavar="DIR"
    )


def main(argv: Sequence[str]) -> int:
    """Prints the first API key when it makes one; returns 0. Raises `PdserveError`."""
    config = load(SecretsConfig, "secrets", argv, description=__doc__)
    if (config.to is None) == (config.kubernetes_secret is None):
        raise SetupError("Give either --to DIR or --kubernetes-secret NAME.")
    if config.by_reader and config.to is None:
        raise SetupError(
            "--by-reader needs --to DIR. In Kubernetes, volumes name the keys of the Secret that a pod gets."
        )
    groups = new_secrets(datetime.now(UTC))
    if config.kubernetes_secret is not None:
        server = api_server(Path(config.service_account))
        # The cluster's own comes last: one that lacks keys is an error, and no reason to be without the other.
        for suffix in (STATE_SUFFIX, ""):
            own = [group for group in groups if group.secret_suffix == suffix]
            _make_secret(server, config.kubernetes_secret + suffix, own)
        return 0
    directory = Path(config.to or "").expanduser()
    made = write_missing(directory, groups, _show, by_reader=config.by_reader)
    _report(f"Made in {directory}: {', '.join(made) or 'nothing, all of it is there'}.")
    return 0


def _make_secret(server: ApiServer, name: str, groups: Sequence[SecretGroup]) -> None:
    files = {key: content for group in groups for key, content in group.files.items()}
    shown: list[str] = []

    def show() -> None:
        for group in groups:
            if group.api_key is not None:
                _show(group.api_key)
                shown.append(group.api_key)

    is_made = server.create_secret(name, files, show)
    _report(f"The Secret {name} in the namespace {server.namespace} {'is made' if is_made else 'stays as it is'}.")
    if shown and not is_made:
        _report("The key above is not in it: it was made elsewhere at the same time, where its key was shown.")


def _show(api_key: str) -> None:
    print(f"The first API key, which is shown this once: {api_key}", flush=True)


def _report(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
