"""Reads the cores, GPUs and memory available to this process, within the quota and limits of its control group."""

from __future__ import annotations

import os
from pathlib import Path

from pdserve.base.config import variable
from pdserve.base.machine import CGROUP, available_memory_bytes, read_number
from pdserve.cli.placement import Cores, Hardware


def available_hardware() -> Hardware:
    """Resources that workers started by this process can use."""
    return Hardware(cores=available_cores(), num_gpus=num_visible_gpus(), free_memory_bytes=available_memory_bytes())


def available_cores(cgroup: Path = CGROUP) -> Cores:
    """The cores this process may run on, and how many of them a CPU quota lets it use at a time."""
    ids = tuple(sorted(os.sched_getaffinity(0)))
    return Cores(ids=ids, usable=min(len(ids), quota_cores(cgroup) or len(ids)))


def num_visible_gpus(driver: Path = Path("/proc/driver/nvidia/gpus")) -> int:
    """GPUs visible to processes started here, at least one: the worker finds out whether it exists."""
    visible = variable("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return max(1, len([entry for entry in visible.split(",") if entry.strip()]))
    return max(1, len(list(driver.iterdir())) if driver.is_dir() else 1)


def quota_cores(cgroup: Path) -> int | None:
    """Whole cores in the CPU quota, at least one; None without a quota. Reads both versions of control groups."""
    quota, period = read_number(cgroup / "cpu.max", 0), read_number(cgroup / "cpu.max", 1)
    if quota is None:
        quota, period = read_number(cgroup / "cpu/cpu.cfs_quota_us"), read_number(cgroup / "cpu/cpu.cfs_period_us")
    if quota is None or period is None or quota <= 0 or period <= 0:
        return None
    return max(1, quota // period)
