"""Cores and memory within quotas and limits of control groups: trees of both versions, and this machine's own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from pdserve.observe.machine import CGROUP, available_cores, available_memory_bytes, quota_cores

MIB = 1024**2
GIB = 1024**3


def write(directory: Path, **files: str) -> Path:
    """Writes control files; two underscores in a name stand for the dot."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / name.replace("__", ".")).write_text(text + "\n")
    return directory


def member(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "membership"
    path.write_text("".join(line + "\n" for line in lines))
    return path


def test_the_quota_of_control_groups_version_2_is_read(tmp_path: Path) -> None:
    write(tmp_path, cpu__max="250000 100000")
    assert quota_cores(tmp_path) == 2
    assert available_cores(tmp_path).usable <= 2


def test_the_quota_of_control_groups_version_1_is_read(tmp_path: Path) -> None:
    write(tmp_path / "cpu", cpu__cfs_quota_us="50000", cpu__cfs_period_us="100000")
    assert quota_cores(tmp_path) == 1


@pytest.mark.parametrize("text", ["max 100000", "", "nonsense"])
def test_without_a_quota_all_cores_count(tmp_path: Path, text: str) -> None:
    write(tmp_path, cpu__max=text)
    assert quota_cores(tmp_path) is None
    cores = available_cores(tmp_path)
    assert (cores.usable, cores.has_quota) == (len(cores.ids), False)


def test_the_smallest_quota_of_all_groups_around_this_process_holds(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    write(root / "a", cpu__max="300000 100000")
    write(root / "a" / "b", cpu__max="800000 100000")
    write(root / "other", cpu__max="100000 100000")
    assert quota_cores(root, member(tmp_path, "0::/a/b")) == 3
    assert quota_cores(root, member(tmp_path, "0::/")) is None
    v1 = write(tmp_path / "v1" / "cpu" / "a", cpu__cfs_quota_us="700000", cpu__cfs_period_us="100000").parents[1]
    assert quota_cores(v1, member(tmp_path, "5:memory:/elsewhere", "4:cpu,cpuacct:/a", "0::/")) == 7


def test_a_path_that_the_container_cannot_see_means_its_outermost_group(tmp_path: Path) -> None:
    root = write(tmp_path / "cgroup" / "cpu", cpu__cfs_quota_us="200000", cpu__cfs_period_us="100000").parent
    assert quota_cores(root, member(tmp_path, "4:cpu,cpuacct:/docker/0123")) == 2
    assert quota_cores(root, member(tmp_path, "4:cpu,cpuacct:/../../system.slice")) == 2
    assert quota_cores(root, tmp_path / "absent") == 2


def test_a_memory_limit_counts_and_cached_files_are_free(tmp_path: Path) -> None:
    write(
        tmp_path,
        memory__max=str(100 * MIB),
        memory__current=str(90 * MIB),
        memory__stat=f"anon {40 * MIB}\ninactive_file {20 * MIB}\nactive_file {10 * MIB}\nslab_reclaimable {5 * MIB}",
    )
    assert available_memory_bytes(tmp_path) == 45 * MIB
    write(tmp_path, memory__max="max")
    assert available_memory_bytes(tmp_path) > GIB // 4


def test_memory_limits_of_version_1_count_with_the_subgroups_cached_files(tmp_path: Path) -> None:
    write(
        tmp_path / "memory",
        memory__limit_in_bytes=str(100 * MIB),
        memory__usage_in_bytes=str(99 * MIB),
        memory__stat=f"inactive_file 1\ntotal_inactive_file {20 * MIB}\ntotal_active_file {30 * MIB}\ntotal_rss 7",
    )
    assert available_memory_bytes(tmp_path) == 51 * MIB


def test_without_statistics_a_group_has_what_it_does_not_use(tmp_path: Path) -> None:
    write(tmp_path, memory__max="1000000", memory__current="400000")
    assert available_memory_bytes(tmp_path) == 600_000
    write(tmp_path, memory__current="1400000")
    assert available_memory_bytes(tmp_path) == 0


def test_the_limit_that_slows_a_group_down_counts_like_the_hard_one(tmp_path: Path) -> None:
    write(tmp_path, memory__max="9000000", memory__high="1000000", memory__current="100000")
    assert available_memory_bytes(tmp_path) == 900_000


def test_statistics_never_make_more_of_a_limit_than_it_is(tmp_path: Path) -> None:
    write(tmp_path, memory__max="1000000", memory__current="10", memory__stat="inactive_file 5000")
    assert available_memory_bytes(tmp_path) == 1_000_000


def test_the_tightest_memory_limit_around_this_process_holds(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    write(root / "a", memory__max=str(3 * MIB), memory__current=str(MIB))
    write(root / "a" / "b", memory__max=str(9 * MIB), memory__current="0")
    assert available_memory_bytes(root, member(tmp_path, "0::/a/b")) == 2 * MIB


@contextmanager
def real_group(controller: str, file: str) -> Iterator[Path]:
    """A group of this kernel, version 1 or 2, that this test made and may limit by `file` of version 2."""
    parent = CGROUP / controller if (CGROUP / controller).is_dir() else CGROUP
    group = parent / f"pdserve-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"this user may not make control groups: {error.strerror}")
    try:
        if parent == CGROUP and not (group / file).exists():
            pytest.skip(f"the controller {controller} is not delegated to new groups here")
        yield group
    finally:
        group.rmdir()


#: Joins the group, reads a file into the page cache, and prints what is available before and after.
_READ_A_FILE = """
import os, sys
from pathlib import Path
from pdserve.observe.machine import available_memory_bytes
group, path = Path(sys.argv[1]), sys.argv[2]
(group / "cgroup.procs").write_text(str(os.getpid()))
before = available_memory_bytes()
with open(path, "wb") as file:
    for _ in range(64):
        file.write(os.urandom(1 << 20))
    file.flush()
    os.fsync(file.fileno())
with open(path, "rb") as file:  # What others have displaced meanwhile comes back.
    while file.read(1 << 20):
        pass
after = available_memory_bytes()
name = "memory.current" if (group / "memory.current").exists() else "memory.usage_in_bytes"
print(before, after, int((group / name).read_text()))
"""


#: Joins the group and prints how many cores it may use at a time.
_COUNT_CORES = """
import os, sys
from pathlib import Path
from pdserve.observe.machine import available_cores
(Path(sys.argv[1]) / "cgroup.procs").write_text(str(os.getpid()))
print(available_cores().usable)
"""


def output_of(code: str, *arguments: str) -> str:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_a_file_in_the_page_cache_of_a_real_group_takes_nothing_away(tmp_path: Path) -> None:
    limit = 512 * MIB
    if psutil.virtual_memory().available < 2 * limit:
        pytest.skip("this machine has too little memory for the group's limit to be the smaller one")
    with real_group("memory", "memory.max") as group:
        name = "memory.max" if (group / "memory.max").exists() else "memory.limit_in_bytes"
        (group / name).write_text(str(limit))
        before, after, used = map(int, output_of(_READ_A_FILE, str(group), str(tmp_path / "file")).split())
    assert before <= limit
    assert used >= 64 * MIB
    assert after > before - 32 * MIB


def test_the_quota_of_a_real_group_bounds_the_cores() -> None:
    with real_group("cpu", "cpu.max") as group:
        if (group / "cpu.max").exists():
            (group / "cpu.max").write_text("150000 100000")
        else:
            (group / "cpu.cfs_quota_us").write_text("150000")
        assert output_of(_COUNT_CORES, str(group)).strip() == "1"
