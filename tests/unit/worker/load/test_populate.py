"""Populating memory leaves its contents alone, covers all of it, and ends on request.

Idle priority is recorded here, not applied: on a busy machine such a thread may get no time for minutes.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading

import numpy as np
import numpy.typing as npt
import pytest

from pdserve.worker.load import populate

needs_idle_priority = pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="no idle priority on this system")


@pytest.fixture(autouse=True)
def idle_threads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the threads that asked for idle priority; none of them gets it."""
    names: list[str] = []

    def record(pid: int, policy: int, param: object) -> None:
        assert (pid, policy) == (0, os.SCHED_IDLE)
        names.append(threading.current_thread().name)

    monkeypatch.setattr(os, "sched_setscheduler", record, raising=False)
    return names


def _resident_share(memory: npt.NDArray[np.uint8]) -> float:
    """Share of the pages of this memory alone; other parts of the process come and go."""
    libc = ctypes.CDLL(None, use_errno=True)
    pages = (ctypes.c_ubyte * (memory.nbytes // mmap.PAGESIZE))()
    assert libc.mincore(ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(memory.nbytes), pages) == 0
    return sum(page & 1 for page in pages) / len(pages)


def test_contents_stay_and_the_pages_are_there() -> None:
    # A mapping of its own: what an allocator gives may have been in use, and be resident already.
    pages = mmap.mmap(-1, 64 * 1024**2, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = np.frombuffer(pages, dtype=np.uint8)
    if populate._madvise(memory.ctypes.data, mmap.PAGESIZE):
        pytest.skip("this system does not populate memory")
    memory[12345] = 7
    assert _resident_share(memory) < 0.1
    populate._populate(memory, threading.Event())
    assert _resident_share(memory) == 1
    assert memory[12345] == 7
    assert int(memory.sum(dtype=np.int64)) == 7


def test_chunks_are_whole_pages_within_the_memory() -> None:
    memory = np.zeros(3 * 1024**2 + 5, dtype=np.uint8)[3:]
    chunks = list(populate._chunks(memory))
    assert all(start % mmap.PAGESIZE == size % mmap.PAGESIZE == 0 for start, size in chunks)
    assert chunks[0][0] >= memory.ctypes.data
    assert chunks[-1][0] + chunks[-1][1] <= memory.ctypes.data + memory.nbytes
    assert sum(size for _, size in chunks) > memory.nbytes - 2 * mmap.PAGESIZE


def test_a_system_that_refuses_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(populate, "_madvise", lambda address, size: calls.append(size) or 22)
    populate._populate(np.zeros(64 * 1024**2, dtype=np.uint8), threading.Event())
    assert len(calls) == 1


def test_nothing_more_is_populated_after_the_end_is_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    stop = threading.Event()
    calls: list[int] = []

    def madvise(address: int, size: int) -> int:
        calls.append(size)
        stop.set()
        return 0

    monkeypatch.setattr(populate, "_madvise", madvise)
    populate._populate(np.zeros(256 * 1024**2, dtype=np.uint8), stop)
    assert len(calls) == 1


@needs_idle_priority
def test_it_runs_on_a_thread_of_idle_priority_that_ends_with_the_block(
    monkeypatch: pytest.MonkeyPatch, idle_threads: list[str]
) -> None:
    populating_now = threading.Event()
    release = threading.Event()

    def madvise(address: int, size: int) -> int:
        populating_now.set()
        release.wait()
        return 0

    monkeypatch.setattr(populate, "_madvise", madvise)
    with populate.populating(np.zeros(256 * 1024**2, dtype=np.uint8)):
        populating_now.wait()
        assert "populate-kv" in {thread.name for thread in threading.enumerate()}
        release.set()
    assert "populate-kv" not in {thread.name for thread in threading.enumerate()}
    assert idle_threads == ["populate-kv"]
