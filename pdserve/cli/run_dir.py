"""The directory of one run of `pdserve up`: for what its processes share, for this user only, gone with the run."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pdserve.base.config import variable

_SHARED_MEMORY = Path("/dev/shm")


@contextmanager
def private_directory() -> Iterator[Path]:
    """A new directory, in memory where the system has such a place; removed with the block."""
    # Should we be killed before we can, the system empties a session's runtime directory when that ends, shared memory
    # when it starts again.
    runtime = Path(variable("XDG_RUNTIME_DIR") or _SHARED_MEMORY)
    try:
        directory = Path(tempfile.mkdtemp(prefix="pdserve-", dir=runtime))
    except OSError:  # No such place, or not for us.
        directory = Path(tempfile.mkdtemp(prefix="pdserve-"))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
