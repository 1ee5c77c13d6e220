"""The Python interpreter that `pdserve up` runs its processes with."""

from __future__ import annotations

import os
import sys


def python_flags() -> tuple[str, ...]:
    """`-P`, so that files in the working directory cannot shadow a module; empty if our own path includes it."""
    return () if "" in sys.path or os.getcwd() in sys.path else ("-P",)
