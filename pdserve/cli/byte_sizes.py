"""Numbers of bytes as text for people."""

from __future__ import annotations

MIB, GIB = 1 << 20, 1 << 30


def binary_size(num_bytes: int) -> str:
    """In MiB, or from 1 GiB on in GiB, as memory of machines is measured."""
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:.0f} MiB"


def decimal_size(num_bytes: float) -> str:
    """In decimal units, as memory of GPUs is sold."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes:.0f} B"
