"""Claims on cores: locks on the lines of the lease file (`core_leases.py`), one line per core.

The kernel releases a lock when its process ends, however it ends. So a claim is never stale, and no process has to
notice a death.
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Sequence
from pathlib import Path

from pdserve.base.errors import SetupError
from pdserve.worker.load.claim_policy import choose_cores
from pdserve.worker.load.core_leases import LINE_BYTES, MAX_CPUS

#: `struct flock`: type, whence, start, length, pid. The pid must be 0 for locks of an open file.
_FLOCK = struct.Struct("hhqqi4x")
#: Offset of the lock that a worker holds while it looks for free cores: two at a time would each take some of them.
_SEARCH_LOCK = MAX_CPUS * LINE_BYTES


class CoreClaims:
    """The locks of one worker in the lease file, until it is closed."""

    def __init__(self, path: Path) -> None:
        """Creates the file if it is missing. Raises OSError, and `SetupError` where there are no such locks."""
        if not hasattr(fcntl, "F_OFD_SETLK"):
            raise SetupError("--claim-dir needs Linux: cores are claimed by locks of open files. Use --cpus instead.")
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(self._file, MAX_CPUS * LINE_BYTES)

    def __enter__(self) -> CoreClaims:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._file)

    def take(self, candidates: Sequence[int], order: Sequence[int], count: int) -> tuple[int, ...]:
        """Claims at most `count` of the candidates that nobody holds. What dead workers left on free lines is cleared.

        Otherwise a core whose owner died at work would look busy, and would not be lent until it has an owner again.
        """
        self._lock(_SEARCH_LOCK, 1, wait=True)
        try:
            free = [cpu for cpu in candidates if self._lock(cpu * LINE_BYTES, LINE_BYTES)]
            own = choose_cores(free, order, count)
            for cpu in free:
                os.pwrite(self._file, bytes(LINE_BYTES), cpu * LINE_BYTES)
                if cpu not in own:
                    self._unlock(cpu * LINE_BYTES, LINE_BYTES)
            return own
        finally:
            self._unlock(_SEARCH_LOCK, 1)

    def _lock(self, start: int, length: int, *, wait: bool = False) -> bool:
        """Whether this worker holds the range now."""
        command = fcntl.F_OFD_SETLKW if wait else fcntl.F_OFD_SETLK
        try:
            fcntl.fcntl(self._file, command, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, length, 0))
        except (BlockingIOError, PermissionError):
            return False
        return True

    def _unlock(self, start: int, length: int) -> None:
        fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, start, length, 0))
