"""Triton's compiler accepts all kernels that the interpreter runs: compiles them for a Hopper GPU, without having one.

Only `PDSERVE_TEST_DEPTH=full` compiles all variants. Without it, each kernel is compiled at least once.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.depth import IS_FULL

pytest.importorskip("triton")


@pytest.mark.slow
def test_every_kernel_compiles_for_a_hopper_gpu(tmp_path: Path) -> None:
    # In a process of its own, since kernels are interpreted here, and with an empty cache.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    out = subprocess.run(
        [sys.executable, "-m", "tests.support.compiles", *([] if IS_FULL else ["--few"])],
        capture_output=True,
        text=True,
        check=False,
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
    )
    assert out.returncode == 0, out.stdout + out.stderr
    for kernel in (
        "move_kernel",
        "_linear_kernel",
        "decode_kernel",
        "combine_kernel",
        "prefill_kernel",
        "_choose_kernel",
        "tall product",
        "tall attention",
    ):
        assert f"compiled {kernel}: " in out.stdout
