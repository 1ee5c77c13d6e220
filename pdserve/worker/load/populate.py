"""Populates the pages of the KV cache in the background, off the critical path of requests.

Untouched memory costs a page fault at its first use, and a first transfer into it would run at a fraction of memory
speed. Touching all of it at start would add seconds to every start. So an idle-priority thread populates it, with a
call that leaves the contents alone (madvise(2), MADV_POPULATE_WRITE, Linux 5.14).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from pdserve.base.logs import get_logger

log = get_logger(__name__)

_MADV_POPULATE_WRITE = 23
#: Bytes per system call. A call cannot be interrupted, so this bounds how long the process waits for one at its end.
_CHUNK_BYTES = 16 * 1024**2


@contextmanager
def populating(memory: npt.NDArray[np.uint8] | None) -> Iterator[None]:
    """Populates contiguous `memory` in the background, front to back, until it is done or the block ends."""
    if memory is None:
        yield
        return
    stop = threading.Event()
    thread = threading.Thread(target=_populate, args=(memory, stop), name="populate-kv", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _populate(memory: npt.NDArray[np.uint8], stop: threading.Event) -> None:
    started = time.monotonic()
    if hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    for start, size in _chunks(memory):
        if stop.is_set():
            return
        error = _madvise(start, size)
        if error:
            # An older kernel, or a memory limit. Pages are then provided on first use, as without this thread.
            log.info("kv_cache_not_populated", reason=os.strerror(error))
            return
    log.info("kv_cache_populated", bytes=memory.nbytes, took_s=time.monotonic() - started)


def _chunks(memory: npt.NDArray[np.uint8]) -> Iterator[tuple[int, int]]:
    """Chunks of whole pages within the memory, as (address, size)."""
    first = -(-memory.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (memory.ctypes.data + memory.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    for start in range(first, end, _CHUNK_BYTES):
        yield start, min(_CHUNK_BYTES, end - start)


def _madvise(address: int, size: int) -> int:
    """Returns 0 or the errno. Other threads run in the meantime: ctypes releases the interpreter's lock."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), _MADV_POPULATE_WRITE) == 0:
        return 0
    return ctypes.get_errno()
