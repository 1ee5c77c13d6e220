"""Whether this process has opened a GPU. One that has can fork no process that uses a GPU: CUDA does not allow it."""

from __future__ import annotations

import os
from contextlib import suppress

#: What the names of the driver's device files start with; the second is that of Windows' subsystem for Linux.
_GPU_FILES: tuple[str, ...] = ("/dev/nvidia", "/dev/dxg")


def opened_gpu_files() -> list[str]:
    """The driver's device files that this process has open, without CUDA being asked."""
    opened: set[str] = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # That of the listing itself.
            opened.add(os.readlink(f"/proc/self/fd/{descriptor}"))
    return sorted(name for name in opened if name.startswith(_GPU_FILES))
