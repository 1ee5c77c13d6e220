"""Whole services under simulated faults. A failure names a seed: `python -m tests.simulation --seed N` repeats it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("lupa", reason="Redis scripts need a Lua interpreter: pip install -e '.[dev]'")
_ROOT = Path(__file__).parents[2]


def _simulate(*arguments: str) -> tuple[int, list[dict[str, object]]]:
    command = [sys.executable, "-m", "tests.simulation", *arguments]
    environment = os.environ | {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.stdout, done.stderr
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


def test_a_thousand_requests_under_a_hundred_faults_lose_nothing_repeat_nothing_and_leave_nothing() -> None:
    """Also: what happens is decided by the seed alone, to the last message."""
    status, reports = _simulate("--requests", "1000", "--faults", "100", "--seed", "1", "--replay", "40")
    *episodes, total = reports
    assert [report["violations"] for report in episodes] == [[] for _ in episodes]
    assert total["replays_exactly"] is True
    assert status == 0
    assert sum(report["outcomes"]["done"] for report in episodes) > 900  # type: ignore[index]
