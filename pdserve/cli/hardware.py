"""Reads the cores, GPUs and memory available to this process, within the quota and limits of its control group."""

from __future__ import annotations

from pathlib import Path

from pdserve.base.config import variable
from pdserve.cli.placement import Hardware
from pdserve.observe.machine import available_cores, available_memory_bytes


def available_hardware() -> Hardware:
    """Resources that workers started by this process can use."""
    return Hardware(cores=available_cores(), num_gpus=num_visible_gpus(), free_memory_bytes=available_memory_bytes())


def num_visible_gpus(driver: Path = Path("/proc/driver/nvidia/gpus")) -> int:
    """GPUs visible to processes started here, at least one: the worker finds out whether it exists."""
    visible = variable("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return max(1, len([entry for entry in visible.split(",") if entry.strip()]))
    return max(1, len(list(driver.iterdir())) if driver.is_dir() else 1)
