"""`kernels/cpu/src/phase_scheduler.h` alone: a thread that is stopped at the worst point, again and again."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SOURCES = HERE.parents[2] / "kernels" / "cpu" / "src"
COMPILER = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_a_stragglers_result_is_dropped_and_every_unit_is_committed_once(tmp_path: Path) -> None:
    program = tmp_path / "phase_scheduler_test"
    flags = ["-std=c++20", "-O2", "-Wall", "-Wextra", "-pthread", f"-I{SOURCES}"]
    source = HERE / "phase_scheduler_test.cpp"
    subprocess.run([str(COMPILER), *flags, str(source), "-o", str(program)], check=True, timeout=100)
    for _ in range(5):
        done = subprocess.run([str(program)], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout
