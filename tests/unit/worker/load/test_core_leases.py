"""Core leases as every worker reads them from the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.worker.load.core_leases import LINE_BYTES, MAX_CPUS, CoreLeases

CPUS = range(5)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cores"


def words(path: Path, word: int) -> list[int]:
    """That word of the first cores' lines, as any process reads it."""
    content = path.read_bytes()
    starts = [cpu * LINE_BYTES + 4 * word for cpu in CPUS]
    return [int.from_bytes(content[start : start + 4], "little") for start in starts]


def busy(path: Path) -> list[int]:
    return words(path, 0)


def borrowers(path: Path) -> list[int]:
    return words(path, 1)


def borrow(leases: CoreLeases, cpu: int) -> None:
    """Marks a core as C++ does."""
    start = cpu * LINE_BYTES + 4
    leases.memory[start : start + 4] = leases.borrower.to_bytes(4, "little")


def test_the_first_worker_creates_the_file_for_this_user_only(path: Path) -> None:
    CoreLeases(path, [1, 2])
    assert (path.stat().st_size, path.stat().st_mode & 0o777) == (MAX_CPUS * LINE_BYTES, 0o600)
    CoreLeases(path, [4])
    assert busy(path) == [0, 1, 1, 0, 1]


def test_a_worker_is_busy_until_it_reports_otherwise_and_only_marks_its_own_cores(path: Path) -> None:
    one, other = CoreLeases(path, [0, 1]), CoreLeases(path, [2, 3])
    assert busy(path) == [1, 1, 1, 1, 0]
    one.set_busy(False)
    assert busy(path) == [0, 0, 1, 1, 0]
    other.set_busy(False)
    one.set_busy(True)
    assert busy(path) == [1, 1, 0, 0, 0]


def test_a_workers_writes_are_visible_in_the_others_memory(path: Path) -> None:
    one, other = CoreLeases(path, [0]), CoreLeases(path, [1])
    one.set_busy(False)
    assert other.memory[:4] == bytes(4)
    one.set_busy(True)
    assert other.memory[:4] != bytes(4)


def test_each_borrower_has_a_mark_of_its_own(path: Path) -> None:
    marks = [CoreLeases(path, cpus).borrower for cpus in ([0], [1, 2], [3])]
    assert len({*marks, 0}) == 4


def test_the_marks_of_a_worker_that_died_are_cleared_when_it_is_back(path: Path) -> None:
    died, other = CoreLeases(path, [0, 1]), CoreLeases(path, [2])
    borrow(died, 3)
    borrow(other, 4)
    back = CoreLeases(path, [0, 1])
    assert borrowers(path) == [0, 0, 0, 0, other.borrower]
    back.set_busy(False)
    assert busy(path) == [0, 0, 1, 0, 0]


def test_an_owner_that_comes_back_leaves_the_borrowers_mark(path: Path) -> None:
    other = CoreLeases(path, [2])
    borrow(other, 0)
    CoreLeases(path, [0])
    assert (busy(path)[0], borrowers(path)[0]) == (1, other.borrower)


def test_every_worker_sees_whether_any_has_work(path: Path) -> None:
    one, other = CoreLeases(path, [0]), CoreLeases(path, [3])
    one.set_busy(False)
    assert one.is_any_busy()
    other.set_busy(False)
    assert not one.is_any_busy()
    borrow(other, 0)
    assert not one.is_any_busy()
