"""`pdserve secrets`: makes what keeps strangers out of a cluster, and shows the first API key once."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from pdserve.base.config import load, option
from pdserve.cli.cluster_secrets.contents import new_secrets
from pdserve.cli.cluster_secrets.directory import write_missing


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretsConfig:
    """Settings of `pdserve secrets`."""

    to: str = option(help="directory to write them to; what is there stays as it is", metavar="DIR")


def main(argv: Sequence[str]) -> int:
    """Prints the first API key when it makes one; returns 0. Raises `SetupError`."""
    config = load(SecretsConfig, "secrets", argv, description=__doc__)
    directory = Path(config.to).expanduser()
    made = write_missing(directory, new_secrets(datetime.now(UTC)), _show)
    print(f"Made in {directory}: {', '.join(made) or 'nothing, all of it is there'}.", file=sys.stderr, flush=True)
    return 0


def _show(api_key: str) -> None:
    print(f"The first API key, which is shown this once: {api_key}", flush=True)
