"""`pdserve bench kernels`: runs the kernels' own benchmark in a process of its own, for it needs torch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Returns the exit code; `argv` is what `python -m kernels.bench` takes."""
    return subprocess.run([sys.executable, "-m", "kernels.bench", *argv], check=False).returncode
