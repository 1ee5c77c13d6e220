"""The GPU benchmark with graphs, events and streams, on tiny shapes and a simulated GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import setting
from benchmarks.gpu.rows import ROWS
from tests.support.devices import SIMULATED

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not SIMULATED, reason="no simulated GPU; PDSERVE_TEST_GPU=simulated"),
]


@pytest.mark.parametrize("row", [row.key for row in ROWS if row.key != "handover-nccl"])
def test_a_row_is_measured(row: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setting, "FULL", setting.TINY)
    assert command.main(["--only", row, "--out", str(tmp_path)]) == 0
    (results,) = tmp_path.glob("gpu-*.json")
    (found,) = [each for each in json.loads(results.read_text())["rows"] if each["key"] == row]
    assert found["samples_ms"]
