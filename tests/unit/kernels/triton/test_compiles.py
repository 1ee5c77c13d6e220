"""What the interpreter runs, the compiler takes: every kernel is compiled for a Hopper GPU, with or without one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


@pytest.mark.slow
def test_every_kernel_compiles_for_a_hopper_gpu(tmp_path: Path) -> None:
    # Its own process: here kernels are interpreted. Its own cache: what was compiled before proves nothing.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    out = subprocess.run(
        [sys.executable, "-m", "tests.support.compiles"],
        capture_output=True,
        text=True,
        check=False,
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
    )
    assert out.returncode == 0, out.stdout + out.stderr
    for kernel in ("_move_kernel", "_linear_kernel", "decode_kernel", "prefill_kernel", "_choose_kernel"):
        assert f"compiled {kernel}: " in out.stdout
