"""Resolves a model in a separate process, which frees all memory when it ends, and reports its progress.

`python -m pdserve.cli.prepare MODEL [CACHE_DIR]` prints one JSON object per line: `{"doing": ..., "done_bytes": ...,
"total_bytes": ...}` any number of times, then `{"path": ..., "served_name": ...}` or `{"error": ...}`.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from pathlib import Path
from typing import TextIO

from pdserve.base.errors import SetupError
from pdserve.model.resolve import resolve_model

_INTERVAL_S = 0.1


class _Reporter:
    """Prints progress, but no more often than a user can read it."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._last = ("", 0.0)

    def __call__(self, what: str, done_bytes: int, total_bytes: int | None) -> None:
        now = time.monotonic()
        if what == self._last[0] and now < self._last[1] + _INTERVAL_S:
            return
        self._last = (what, now)
        self.send({"doing": what, "done_bytes": done_bytes, "total_bytes": total_bytes})

    def send(self, message: dict[str, object]) -> None:
        """Prints a message as one line."""
        self._out.write(json.dumps(message) + "\n")
        self._out.flush()


def main(argv: list[str]) -> int:
    """Resolves the model that `argv` names; returns the exit code."""
    reporter = _Reporter(sys.stdout)
    cache_dir = Path(argv[1]).expanduser() if len(argv) > 1 else None
    try:
        with contextlib.redirect_stdout(sys.stderr):  # Output of libraries must not mix with our lines.
            resolved = resolve_model(argv[0], cache_dir=cache_dir, progress=reporter)
    except SetupError as error:
        reporter.send({"error": str(error)})
        return 1
    reporter.send({"path": str(resolved.path), "served_name": resolved.served_name})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
