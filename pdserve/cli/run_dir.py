"""Directories of one run of `pdserve up`: a private one that its processes share, and one for its logs."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from pdserve.base.config import variable
from pdserve.base.errors import SetupError

_SHARED_MEMORY = Path("/dev/shm")


@contextmanager
def private_directory() -> Iterator[Path]:
    """A new directory that only this user can open, in memory where possible; removed when the block ends."""
    # If this process is killed first, the system cleans up: a session's runtime directory when the session ends, shared
    # memory at the next boot.
    runtime = Path(variable("XDG_RUNTIME_DIR") or _SHARED_MEMORY)
    try:
        directory = Path(tempfile.mkdtemp(prefix="pdserve-", dir=runtime))
    except OSError:  # It does not exist, or this user may not write there.
        directory = Path(tempfile.mkdtemp(prefix="pdserve-"))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def make_log_dir(chosen: str | None) -> Path:
    """The chosen directory for this run's logs, else a new one named after the time. Raises `SetupError`."""
    if chosen is not None:
        path = Path(chosen).expanduser().absolute()
    else:
        state = variable("XDG_STATE_HOME")
        root = Path(state) if state else Path.home() / ".local" / "state"
        path = root / "pdserve" / "logs" / datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SetupError(
            f"Cannot make the log directory {path}: {error.strerror}. Choose one with --log-dir."
        ) from error
    return path
