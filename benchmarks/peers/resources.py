"""Resources of the machine and their use: read bandwidth, load, and the memory of a process tree."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil

from kernels.bench.measure import measure_limits
from kernels.choice import instruction_sets

_BANDWIDTH_BYTES = 1 << 30
_PASSES = 4
_SAMPLE_EVERY_S = 0.25
_LOAD_SAMPLE_S = 1.0

#: Reductions with little computation; which of them is fastest depends on the processor.
_READS: tuple[Callable[[np.ndarray], object], ...] = (
    lambda array: array.view(np.float32).max(),
    lambda array: array.view(np.uint64).sum(),
    lambda array: array.view(np.int8).max(),
)


def read_gb_per_s(threads: int) -> float:
    """Maximum rate at which `threads` threads read memory together, with NumPy or our kernels."""
    arrays = [np.ones(_BANDWIDTH_BYTES // threads // 8, np.float64) for _ in range(threads)]
    with ThreadPoolExecutor(threads) as pool:
        best = max(_rate(pool, arrays, read) for read in _READS for _ in range(_PASSES))
    for instruction_set in instruction_sets()[:1]:
        best = max(best, measure_limits(instruction_set, threads, _PASSES).read_gb_per_s)
    return best


def _rate(pool: ThreadPoolExecutor, arrays: Sequence[np.ndarray], read: Callable[[np.ndarray], object]) -> float:
    started_at = time.perf_counter()
    list(pool.map(read, arrays))
    return sum(array.nbytes for array in arrays) / (time.perf_counter() - started_at) / 1e9


def busy_percent() -> float:
    """Processor time used by other processes, in percent, during a second in which nothing of ours runs."""
    return psutil.cpu_percent(_LOAD_SAMPLE_S)


def tree(pid: int) -> list[psutil.Process]:
    """A process and all its descendants."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def tree_pss_bytes(pid: int) -> int:
    """Memory of a process tree in bytes. Pages shared within it count once, those shared with others in proportion."""
    return sum(_pss_bytes(process.pid) for process in tree(pid))


def _pss_bytes(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    except OSError:
        return 0
    return sum(1024 * int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:"))


class PeakMemory:
    """Peak memory of a process tree, found by sampling."""

    def __init__(self) -> None:
        self.peak_bytes = 0

    @contextmanager
    def watching(self, pid: int) -> Iterator[None]:
        """Samples while the block runs. Sampling takes processor time, so nothing is timed in the block."""
        done = threading.Event()

        def watch() -> None:
            is_over = False
            while not is_over:
                is_over = done.wait(_SAMPLE_EVERY_S)
                self.peak_bytes = max(self.peak_bytes, tree_pss_bytes(pid))

        thread = threading.Thread(target=watch, name="peak-memory")
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
