"""Populating memory leaves its contents alone, covers all of it, waits for those who compute, and ends on request.

Idle priority is recorded here, not applied: on a busy machine such a thread may get no time for minutes.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from pdserve.worker.load import populate, populate_policy
from pdserve.worker.load.populate import KvUse
from pdserve.worker.load.populate_policy import HEAD_BYTES, PIECE_BYTES

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


def use(*, is_busy: Callable[[], bool] = lambda: False) -> KvUse:
    return KvUse(is_busy=is_busy)


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine rests as soon as nobody has work."""
    monkeypatch.setattr(populate_policy, "QUIET_S", 0.0)
    monkeypatch.setattr(populate, "INTERVAL_S", 0.0)


def mapped(size: int) -> npt.NDArray[np.uint8]:
    """A mapping of its own: what an allocator gives may have been in use, and be resident already."""
    return np.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=np.uint8)


def skip_unless_populated(memory: npt.NDArray[np.uint8]) -> None:
    if populate._madvise(memory.ctypes.data, mmap.PAGESIZE):
        pytest.skip("this system does not populate memory")


@pytest.mark.usefixtures("no_pauses")
def test_contents_stay_and_the_pages_are_there() -> None:
    memory = mapped(64 * 1024**2)
    skip_unless_populated(memory)
    memory[12345] = 7
    assert _resident_share(memory) < 0.1
    populate._populate(memory, use(), threading.Event())
    assert _resident_share(memory) == 1
    assert memory[12345] == 7
    assert int(memory.sum(dtype=np.int64)) == 7


def test_the_head_is_there_before_anything_else() -> None:
    memory = mapped(2 * HEAD_BYTES)
    skip_unless_populated(memory)
    populate.populate_head(memory)
    assert _resident_share(memory[:HEAD_BYTES]) == 1
    # The mapping may end amid a huge page.
    assert _resident_share(memory[HEAD_BYTES + PIECE_BYTES :]) == 0
    populate.populate_head(None)


def test_pieces_are_whole_pages_within_the_memory_and_end_where_huge_pages_do() -> None:
    memory = np.zeros(9 * 1024**2 + 5, dtype=np.uint8)[3:]
    pieces = list(populate._pieces(memory))
    assert all(start % mmap.PAGESIZE == size % mmap.PAGESIZE == 0 for start, size in pieces)
    assert all((start + size) % PIECE_BYTES == 0 for start, size in pieces[:-1])
    assert pieces[0][0] >= memory.ctypes.data
    assert pieces[-1][0] + pieces[-1][1] <= memory.ctypes.data + memory.nbytes
    assert sum(size for _, size in pieces) > memory.nbytes - 2 * mmap.PAGESIZE
    assert [start for start, _ in pieces[1:]] == [start + size for start, size in pieces[:-1]]


@pytest.mark.usefixtures("no_pauses")
def test_a_system_that_refuses_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(populate, "_madvise", lambda address, size: calls.append(size) or 22)
    populate._populate(np.zeros(64 * 1024**2, dtype=np.uint8), use(), threading.Event())
    assert len(calls) == 1


@pytest.mark.usefixtures("no_pauses")
def test_nothing_more_is_populated_after_the_end_is_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    stop = threading.Event()
    calls: list[int] = []

    def madvise(address: int, size: int) -> int:
        calls.append(size)
        stop.set()
        return 0

    monkeypatch.setattr(populate, "_madvise", madvise)
    populate._populate(np.zeros(256 * 1024**2, dtype=np.uint8), use(), stop)
    assert len(calls) == 1


@pytest.mark.usefixtures("no_pauses")
def test_populating_waits_while_a_worker_has_work(monkeypatch: pytest.MonkeyPatch) -> None:
    stop = threading.Event()
    calls: list[int] = []
    looks = 0

    def is_busy() -> bool:
        nonlocal looks
        looks += 1
        if looks == 20:
            stop.set()
        return looks > 3

    monkeypatch.setattr(populate_policy, "QUIET_S", 1e-9)
    monkeypatch.setattr(populate, "_madvise", lambda address, size: calls.append(size) or 0)
    memory = mapped(4 * HEAD_BYTES)
    populate._populate(memory, use(is_busy=is_busy), stop)
    assert len(calls) == 3
    assert looks == 20


@needs_idle_priority
@pytest.mark.usefixtures("no_pauses")
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
    with populate.populating(np.zeros(256 * 1024**2, dtype=np.uint8), use()):
        populating_now.wait()
        assert "populate-kv" in {thread.name for thread in threading.enumerate()}
        release.set()
    assert "populate-kv" not in {thread.name for thread in threading.enumerate()}
    assert idle_threads == ["populate-kv"]


def test_the_thread_stays_on_the_workers_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[object] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cpus: pinned.append((pid, tuple(cpus))))
    populate._yield_to_others((3, 5))
    populate._yield_to_others(())
    assert pinned == [(0, (3, 5))]
