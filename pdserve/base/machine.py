"""Resources of this machine or container: free memory, within the limits of control groups."""

from __future__ import annotations

from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")


def available_memory_bytes(cgroup: Path = CGROUP) -> int:
    """Bytes that can be allocated without swapping, within the container's limit."""
    free = psutil.virtual_memory().available
    for limit_name, used_name in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        limit, used = read_number(cgroup / limit_name), read_number(cgroup / used_name)
        if limit is not None and used is not None:
            free = min(free, max(0, limit - used))
    return free


def read_number(path: Path, field: int = 0) -> int | None:
    """A number in a control file. None if there is no such file, or no limit (`max`)."""
    try:
        return int(path.read_text(encoding="ascii").split()[field])
    except (OSError, ValueError, IndexError):
        return None
