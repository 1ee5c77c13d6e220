"""Populating memory leaves what is in it alone, covers it, and ends when told."""

from __future__ import annotations

import mmap
import os
import threading

import numpy as np
import pytest

from pdserve.worker.load import populate


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE


def test_contents_stay_and_the_pages_are_there() -> None:
    # Of its own: what an allocator gives may have been in use, and be resident already.
    pages = mmap.mmap(-1, 64 * 1024**2, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = np.frombuffer(pages, dtype=np.uint8)
    memory[12345] = 7
    before = _resident_bytes()
    done = threading.Event()
    thread = threading.Thread(target=lambda: (populate._populate(memory, threading.Event()), done.set()))
    thread.start()
    assert done.wait(60)
    thread.join()
    assert _resident_bytes() - before > 0.9 * memory.nbytes
    assert memory[12345] == 7
    assert int(memory.sum(dtype=np.int64)) == 7


def test_pieces_are_whole_pages_within_the_memory() -> None:
    memory = np.zeros(3 * 1024**2 + 5, dtype=np.uint8)[3:]
    pieces = list(populate._pieces(memory))
    assert all(start % mmap.PAGESIZE == size % mmap.PAGESIZE == 0 for start, size in pieces)
    assert pieces[0][0] >= memory.ctypes.data
    assert pieces[-1][0] + pieces[-1][1] <= memory.ctypes.data + memory.nbytes
    assert sum(size for _, size in pieces) > memory.nbytes - 2 * mmap.PAGESIZE


def test_a_system_that_refuses_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(populate, "_madvise", lambda address, size: calls.append(size) or 22)
    with populate.populating(np.zeros(64 * 1024**2, dtype=np.uint8)):
        pass
    assert len(calls) <= 1


def test_the_end_does_not_wait_for_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    first = threading.Event()
    release = threading.Event()

    def madvise(address: int, size: int) -> int:
        first.set()
        release.wait(10)
        return 0

    monkeypatch.setattr(populate, "_madvise", madvise)
    with populate.populating(np.zeros(256 * 1024**2, dtype=np.uint8)):
        assert first.wait(10)
        threading.Timer(0.05, release.set).start()
    assert "populate-kv" not in {thread.name for thread in threading.enumerate()}
    assert os.sched_getscheduler(0) != os.SCHED_IDLE
