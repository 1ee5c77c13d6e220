"""The cores that workers on one machine lend each other while they sleep: one small file that all of them map.

A line of 64 bytes for each CPU, which `kernels/cpu/src/threads.h` knows as `CoreLease`:

    word 0  busy      not 0: the worker whose core it is has work. Only that worker writes it
    word 1  borrower  the worker that computes there meanwhile, 0: nobody. Taken by compare-and-swap, by C++ only

All zero is an idle core. Nobody waits for anything here: an owner that wakes up shares its core until the borrower has
seen it, and what a worker that died has left only keeps a core from being lent, until that worker is back.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path

#: As many CPUs as Linux can have; lines that nobody uses take no memory.
MAX_CPUS = 8192
LINE_BYTES = 64
_WORDS_PER_LINE = LINE_BYTES // 4
_BUSY, _BORROWER = 0, 1


class CoreLeases:
    """One worker's view. Its own cores are busy until it says otherwise: a worker that loads its model has work."""

    def __init__(self, path: Path, cpus: Sequence[int]) -> None:
        """`cpus`: the worker's own, at least one, no other worker's. The file is made when it is not there.

        What this worker borrowed in an earlier life is given back. Raises OSError.
        """
        #: How borrowed cores are marked: the same after a restart, and unlike any other worker's.
        self.borrower = cpus[0] + 1
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(file, MAX_CPUS * LINE_BYTES)
            #: The whole file, shared with the other workers.
            self.memory = mmap.mmap(file, MAX_CPUS * LINE_BYTES)
        finally:
            os.close(file)
        self._words = memoryview(self.memory).cast("I")
        self._own = [cpu * _WORDS_PER_LINE for cpu in cpus]
        self.set_busy(True)
        for line in range(0, len(self._words), _WORDS_PER_LINE):
            if self._words[line + _BORROWER] == self.borrower:
                self._words[line + _BORROWER] = 0

    def set_busy(self, busy: bool) -> None:
        """Whether this worker has work: its cores are lent only while it has none."""
        for line in self._own:
            self._words[line + _BUSY] = busy
