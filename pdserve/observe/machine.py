"""Resources of this machine or container: cores and free memory, within quotas and limits of control groups."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")
#: The groups of this process: a line `id:controllers:path` per hierarchy.
MEMBERSHIP = Path("/proc/self/cgroup")

#: Pages that the kernel frees before it refuses memory to the group. Version 1 sums subgroups under other names.
_RECLAIMABLE = ("inactive_file", "active_file", "slab_reclaimable")
_RECLAIMABLE_V1 = ("total_inactive_file", "total_active_file")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cores:
    """Core numbers this process may run on, and how many of them at a time (fewer under a CPU quota)."""

    ids: tuple[int, ...]
    usable: int

    @property
    def has_quota(self) -> bool:
        """Whether a quota, rather than the number of cores, bounds what this process may use."""
        return self.usable < len(self.ids)


def available_cores(cgroup: Path = CGROUP, membership: Path = MEMBERSHIP) -> Cores:
    """The cores this process may run on, and how many of them a CPU quota lets it use at a time."""
    if hasattr(os, "sched_getaffinity"):
        ids = tuple(sorted(os.sched_getaffinity(0)))
    else:
        ids = tuple(range(os.cpu_count() or 1))
    return Cores(ids=ids, usable=min(len(ids), quota_cores(cgroup, membership) or len(ids)))


def quota_cores(cgroup: Path = CGROUP, membership: Path = MEMBERSHIP) -> int | None:
    """Whole cores in the smallest CPU quota of this process's groups, at least one; None without a quota."""
    quotas = [_quota(group / "cpu.max", group / "cpu.max", 1) for group in _groups("", cgroup, membership)]
    quotas += [
        _quota(group / "cpu.cfs_quota_us", group / "cpu.cfs_period_us", 0)
        for group in _groups("cpu", cgroup, membership)
    ]
    return min((quota for quota in quotas if quota is not None), default=None)


def available_memory_bytes(cgroup: Path = CGROUP, membership: Path = MEMBERSHIP) -> int:
    """Bytes that can be allocated without swapping, within the container's limit.

    Cached files count as free, inside a container as outside: the kernel drops them when memory is needed.
    """
    free = psutil.virtual_memory().available
    for group in _groups("", cgroup, membership):
        limits = [read_number(group / name) for name in ("memory.max", "memory.high")]
        limit = min((each for each in limits if each is not None), default=None)
        free = min(free, _left(limit, read_number(group / "memory.current"), group, _RECLAIMABLE, free))
    for group in _groups("memory", cgroup, membership):
        limit, used = read_number(group / "memory.limit_in_bytes"), read_number(group / "memory.usage_in_bytes")
        free = min(free, _left(limit, used, group, _RECLAIMABLE_V1, free))
    return free


def read_number(path: Path, field: int = 0) -> int | None:
    """A number in a control file. None if there is no such file, or no limit (`max`)."""
    try:
        return int(path.read_text(encoding="ascii").split()[field])
    except (OSError, ValueError, IndexError):
        return None


def _quota(quota_file: Path, period_file: Path, period_field: int) -> int | None:
    quota, period = read_number(quota_file), read_number(period_file, period_field)
    if quota is None or period is None or quota <= 0 or period <= 0:
        return None
    return max(1, quota // period)


def _left(limit: int | None, used: int | None, group: Path, reclaimable: tuple[str, ...], unlimited: int) -> int:
    if limit is None or used is None:
        return unlimited
    statistics = _statistics(group / "memory.stat")
    return max(0, min(limit, limit - used + sum(statistics.get(name, 0) for name in reclaimable)))


def _statistics(path: Path) -> Mapping[str, int]:
    """The lines `name number` of a control file; empty if it cannot be read."""
    try:
        pairs = (line.partition(" ") for line in path.read_text(encoding="ascii").splitlines())
        return {name: int(number) for name, _, number in pairs}
    except (OSError, ValueError):
        return {}


def _groups(controller: str, cgroup: Path, membership: Path) -> Iterator[Path]:
    """Directories of this process's group and of the groups around it, whose limits hold, too; outermost last.

    `controller`: a hierarchy of version 1, or empty for version 2. In a container, the outermost directory that can be
    seen is the container's own group, whatever path `membership` gives it.
    """
    root = cgroup / controller
    names = _path_of(controller, membership)
    for depth in range(len(names), 0, -1):
        group = root.joinpath(*names[:depth])
        if group.is_dir():
            yield group
    yield root


def _path_of(controller: str, membership: Path) -> list[str]:
    """This process's group in a hierarchy; empty if it is not known, or outside of what this namespace can see."""
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        names = [name for name in path.split("/") if name]
        if controller in controllers.split(",") and ".." not in names:
            return names
    return []
