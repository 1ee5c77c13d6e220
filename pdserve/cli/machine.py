"""What this machine, or this container, has to give: cores and memory, with the limits of control groups."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from pdserve.cli.placement import Cores

_CGROUP = Path("/sys/fs/cgroup")


def available_cores(cgroup: Path = _CGROUP) -> Cores:
    """The cores this process may run on, and how many of them a CPU quota lets it use at a time."""
    ids = tuple(sorted(os.sched_getaffinity(0)))
    return Cores(ids=ids, usable=min(len(ids), quota_cores(cgroup) or len(ids)))


def available_memory_bytes(cgroup: Path = _CGROUP) -> int:
    """Memory that can be taken without swapping, within the container's limit."""
    free = psutil.virtual_memory().available
    for limit_name, used_name in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        limit, used = _number(cgroup / limit_name), _number(cgroup / used_name)
        if limit is not None and used is not None:
            free = min(free, max(0, limit - used))
    return free


def quota_cores(cgroup: Path) -> int | None:
    """Whole cores in the CPU quota, at least one; None without a quota. Reads both versions of control groups."""
    quota, period = _number(cgroup / "cpu.max", 0), _number(cgroup / "cpu.max", 1)
    if quota is None:
        quota, period = _number(cgroup / "cpu/cpu.cfs_quota_us"), _number(cgroup / "cpu/cpu.cfs_period_us")
    if quota is None or period is None or quota <= 0 or period <= 0:
        return None
    return max(1, quota // period)


def _number(path: Path, field: int = 0) -> int | None:
    """A number in a control file; None where there is no such file or no limit (`max`)."""
    try:
        return int(path.read_text(encoding="ascii").split()[field])
    except (OSError, ValueError, IndexError):
        return None
