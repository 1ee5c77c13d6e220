"""`pdserve fetch`: downloads and converts a model into a directory, such as a volume that workers read."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pdserve.base.config import load, option, positional
from pdserve.cli.up_model import describe_progress
from pdserve.model.fetched import fetch_model
from pdserve.model.resolve import DEFAULT_MODEL

_INTERVAL_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchConfig:
    """Settings of `pdserve fetch`."""

    model: str = positional(
        DEFAULT_MODEL, help="alias, hub id (org/name), GGUF file or directory of a model", metavar="MODEL"
    )
    to: str = option(help="directory to make; afterwards it is complete, or absent", metavar="DIR")
    verify: bool = option(False, help="if the directory is there: read every byte, not only the sizes")


class _Lines:
    """Progress as lines, seldom enough for a log."""

    def __init__(self) -> None:
        self._last = ("", 0.0)

    def __call__(self, what: str, done_bytes: int, total_bytes: int | None) -> None:
        now = time.monotonic()
        if what == self._last[0] and now < self._last[1] + _INTERVAL_S:
            return
        self._last = (what, now)
        print(describe_progress(what, done_bytes, total_bytes), file=sys.stderr, flush=True)


def main(argv: Sequence[str]) -> int:
    """Prints the directory; returns 0. Raises `SetupError`."""
    config = load(FetchConfig, "fetch", argv, description=__doc__)
    target = Path(config.to).expanduser()
    fetched = fetch_model(config.model, target, _Lines(), verify=config.verify)
    print(fetched.path)
    return 0
