"""Populates the pages of the KV cache in the background, when nobody computes.

Untouched memory costs a page fault at its first use, and a first transfer into it would run at a fraction of memory
speed. Touching all of it at start would add seconds to every start. So its head is populated before the worker is
ready, and a thread populates the rest when the machine's workers rest, with a call that leaves the contents alone
(madvise(2), MADV_POPULATE_WRITE, Linux 5.14).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pdserve.base.logs import get_logger
from pdserve.worker.load.populate_policy import HEAD_BYTES, INTERVAL_S, PIECE_BYTES, PopulatePolicy

log = get_logger(__name__)

_MADV_POPULATE_WRITE = 23


@dataclass(frozen=True, slots=True, kw_only=True)
class KvUse:
    """What the populating thread observes of the worker."""

    #: Whether this worker, or another one that may compute on its cores, has work.
    is_busy: Callable[[], bool]
    #: Cores of the thread: the worker's own, so that it disturbs no other worker; empty: any.
    cpus: Sequence[int] = ()


def populate_head(memory: npt.NDArray[np.uint8] | None) -> None:
    """Populates what the first requests use. Where the system refuses, the thread of `populating` logs why."""
    for start, size in _pieces(memory if memory is None else memory[:HEAD_BYTES]):
        if _madvise(start, size):
            return


@contextmanager
def populating(memory: npt.NDArray[np.uint8] | None, use: KvUse) -> Iterator[None]:
    """Populates contiguous `memory` in the background, front to back, until it is done or the block ends."""
    if memory is None:
        yield
        return
    stop = threading.Event()
    thread = threading.Thread(target=_populate, args=(memory, use, stop), name="populate-kv", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _populate(memory: npt.NDArray[np.uint8], use: KvUse, stop: threading.Event) -> None:
    started = time.monotonic()
    _yield_to_others(use.cpus)
    policy = PopulatePolicy(started)
    for start, size in _pieces(memory):
        while not policy.may_populate(time.monotonic(), is_busy=use.is_busy()):
            if stop.wait(INTERVAL_S):
                return
        if stop.is_set():
            return
        error = _madvise(start, size)
        if error:
            # An older kernel, or a memory limit. Pages are then provided on first use, as without this thread.
            log.info("kv_cache_not_populated", reason=os.strerror(error))
            return
    log.info("kv_cache_populated", bytes=memory.nbytes, took_s=time.monotonic() - started)


def _yield_to_others(cpus: Sequence[int]) -> None:
    """Within this process and its scheduling group, the thread runs when no other one wants the core."""
    if hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    if cpus and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cpus)


def _pieces(memory: npt.NDArray[np.uint8] | None) -> Iterator[tuple[int, int]]:
    """Pieces of whole pages within the memory, as (address, size), which begin and end where huge pages do."""
    if memory is None:
        return
    start = -(-memory.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (memory.ctypes.data + memory.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    while start < end:
        size = min(PIECE_BYTES - start % PIECE_BYTES, end - start)
        yield start, size
        start += size


def _madvise(address: int, size: int) -> int:
    """Returns 0 or the errno. Other threads run in the meantime: ctypes releases the interpreter's lock."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), _MADV_POPULATE_WRITE) == 0:
        return 0
    return ctypes.get_errno()
