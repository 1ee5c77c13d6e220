"""`pdserve bench kernels`: runs the kernels' benchmark in a separate process, because it needs torch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Returns the exit code. `argv` holds the arguments of `python -m kernels.bench`."""
    return subprocess.run([sys.executable, "-m", "kernels.bench", *argv], check=False).returncode
