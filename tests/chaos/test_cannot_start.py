"""A failed start is reported in one readable line, with a non-zero exit code and no process left: real workers.

`tests/unit/cli/test_up.py` has what `pdserve up` finds out by itself.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from pdserve.model.resolve import resolve_model
from tests.support.cluster import MODEL, free_port
from tests.support.depth import IS_FULL

pytestmark = pytest.mark.skipif(not IS_FULL, reason="loads models in vain: `make test-all ARGS=chaos` runs it")


def _up(tmp_path: Path, model: str, *flags: str) -> tuple[int, str]:
    """The exit code and the last line of `pdserve up`."""
    command = [sys.executable, "-m", "pdserve.cli", "up", model, "--log-dir", str(tmp_path / "logs")]
    command += ["--port", str(free_port()), *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    output, _ = process.communicate(timeout=100)
    return process.returncode, output.strip().splitlines()[-1]


@pytest.fixture(autouse=True)
def _nothing_left() -> object:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


def test_a_missing_model_is_named_with_the_known_ones(tmp_path: Path) -> None:
    code, line = _up(tmp_path, "/nowhere/model")
    assert code == 1
    assert "/nowhere/model" in line
    assert MODEL in line


def test_an_unsupported_architecture_is_named_with_the_supported_ones(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    for file in resolve_model(MODEL).path.iterdir():
        (directory / file.name).symlink_to(file)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").unlink()
    (directory / "config.json").write_text(
        json.dumps(config | {"architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2"})
    )
    code, line = _up(tmp_path, str(directory))
    assert code == 1
    assert "amba2" in line
    assert "llama" in line


@pytest.mark.parametrize(
    ("flags", "needles"),
    [
        (("--kv-cache-memory", "1000"), ("cannot hold one block", "--kv-cache-memory")),
        (("--kv-cache-memory", "100000GiB"), ("GiB is free", "--kv-cache-memory")),
        (("--threads-per-worker", "0"), ("--threads-per-worker",)),
        # A worker finds these out after it has loaded the model.
        (("--max-model-len", "9000"), ("8192", "--max-model-len")),
        (("--kv-cache-memory", "10MiB", "--max-model-len", "8000"), ("--kv-cache-memory",)),
    ],
)
def test_an_impossible_setting_is_named_with_its_limit(
    tmp_path: Path, model: str, flags: tuple[str, ...], needles: tuple[str, ...]
) -> None:
    code, line = _up(tmp_path, model, "--prefill", "0", *flags)
    assert code != 0
    for needle in needles:
        assert needle in line
