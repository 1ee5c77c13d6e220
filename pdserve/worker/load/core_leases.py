"""Leases for the cores that idle workers of a machine lend to each other, in one small file that all of them map.

The file has a line of 64 bytes per CPU, `CoreLease` in `kernels/cpu/src/threads.h`:

    word 0  busy      not 0: the core's owner has work. Only the owner writes it
    word 1  borrower  the worker that computes there while the owner is idle, or 0. Taken by compare-and-swap, in C++

All zero is an idle core. No worker ever waits here. An owner that wakes up shares its core until the borrower notices.
A worker that dies leaves marks that only keep cores from being lent, until that worker is back.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

#: The largest number of CPUs that Linux supports. Unused lines take no memory.
MAX_CPUS = 8192
LINE_BYTES = 64
_WORDS_PER_LINE = LINE_BYTES // 4
_BUSY, _BORROWER = 0, 1


class CoreLeases:
    """One worker's view of the file. Its own cores are busy at first: a worker that loads its model has work."""

    def __init__(self, path: Path, cpus: Sequence[int]) -> None:
        """`cpus`: the worker's own cores, at least one, and no other worker's. The file is created if missing.

        Cores that this worker borrowed before a restart are returned. Raises OSError.
        """
        #: Mark on borrowed cores: unique among workers, and the same after a restart.
        self.borrower = cpus[0] + 1
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(file, MAX_CPUS * LINE_BYTES)
            #: The whole file, shared with the other workers.
            self.memory = mmap.mmap(file, MAX_CPUS * LINE_BYTES)
        finally:
            os.close(file)
        self._words = memoryview(self.memory).cast("I")
        self._all_busy = np.frombuffer(self.memory, dtype=np.uint32)[_BUSY::_WORDS_PER_LINE]
        self._own = [cpu * _WORDS_PER_LINE for cpu in cpus]
        self.set_busy(True)
        for line in range(0, len(self._words), _WORDS_PER_LINE):
            if self._words[line + _BORROWER] == self.borrower:
                self._words[line + _BORROWER] = 0

    def set_busy(self, busy: bool) -> None:
        """Reports whether this worker has work. Its cores are lent only while it has none."""
        for line in self._own:
            self._words[line + _BUSY] = busy

    def is_any_busy(self) -> bool:
        """Whether this worker, or any other of the machine, has work. On any thread."""
        return bool(self._all_busy.any())
