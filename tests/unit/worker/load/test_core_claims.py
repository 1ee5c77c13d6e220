"""Claims of real processes, which are killed without a chance to clean up."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pdserve.worker.load.core_claims import CoreClaims
from pdserve.worker.load.core_leases import LINE_BYTES, CoreLeases

MACHINE = (0, 1, 2, 3)

#: A worker that claims two cores, is busy on them, prints them, and lives until it is killed.
_WORKER = """
import sys
from pathlib import Path
from pdserve.worker.load.core_claims import CoreClaims
from pdserve.worker.load.core_leases import CoreLeases
path = Path(sys.argv[1])
own = CoreClaims(path).take((0, 1, 2, 3), (0, 1, 2, 3), 2)
leases = CoreLeases(path, own) if own else None
print(*own, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cores"


@contextmanager
def worker(path: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", _WORKER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def cores_of(process: subprocess.Popen[str]) -> tuple[int, ...]:
    assert process.stdout is not None
    return tuple(map(int, process.stdout.readline().split()))


def test_workers_that_start_at_once_hold_different_cores_and_one_too_many_holds_none(path: Path) -> None:
    with worker(path) as one, worker(path) as two, worker(path) as three:
        claimed = sorted(map(cores_of, (one, two, three)))
    assert claimed == [(), (0, 1), (2, 3)]


def test_the_cores_of_a_killed_worker_are_free_at_once_and_no_longer_look_busy(path: Path) -> None:
    with worker(path) as one, worker(path) as two:
        first, second = cores_of(one), cores_of(two)
        one.kill()
        one.wait()
        busy = [path.read_bytes()[cpu * LINE_BYTES] for cpu in (*first, *second)]
        assert busy == [1, 1, 1, 1]
        with CoreClaims(path) as claims:
            assert claims.take(MACHINE, MACHINE, 1) == first[:1]
            busy = [path.read_bytes()[cpu * LINE_BYTES] for cpu in (*first, *second)]
            assert busy == [0, 0, 1, 1]


def test_a_worker_that_comes_back_finds_its_cores(path: Path) -> None:
    with worker(path) as one, worker(path) as two:
        claimed = cores_of(one), cores_of(two)
        two.kill()
        two.wait()
        with worker(path) as back:
            assert (claimed[0], cores_of(back)) == claimed


def test_closing_the_claims_frees_the_cores(path: Path) -> None:
    with CoreClaims(path) as claims:
        assert claims.take(MACHINE, MACHINE, 4) == MACHINE
        # The worker maps the same file, and closes it after mapping: its locks stay.
        CoreLeases(path, MACHINE)
        with CoreClaims(path) as other:
            assert other.take(MACHINE, MACHINE, 1) == ()
    with CoreClaims(path) as other:
        assert other.take(MACHINE, MACHINE, 1) == (0,)
