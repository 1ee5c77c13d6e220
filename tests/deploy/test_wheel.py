"""The wheel of `make dist` in an environment of its own, far from this clone."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.arch.documents import ROOT
from tests.deploy.engine import run
from tests.deploy.load import Load
from tests.support.cluster import free_port

pytestmark = pytest.mark.deploy


@pytest.fixture(scope="module")
def wheel() -> Path:
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler: a wheel would have no kernels")
    run("make", "-C", ROOT, "dist")
    [path] = (ROOT / "dist").glob("pdserve-*.whl")
    return path


def test_the_wheel_has_kernels_and_data_and_none_of_their_sources(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert any(name.startswith("kernels/cpu/_native.") for name in names)
    assert {"pdserve/py.typed", "pdserve/v1/common_pb2.pyi"} <= set(names)
    assert not [name for name in names if name.endswith((".cpp", ".h")) or name.startswith(("tests/", "build/"))]


def test_an_installed_wheel_serves_without_a_clone(wheel: Path, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    binaries = tmp_path / "venv/bin"
    # As `make` does: pip alone might take a build with CUDA.
    index = "https://download.pytorch.org/whl/cpu"
    pins = ("--constraints", ROOT / "constraints.txt")
    run(binaries / "python", ROOT / "install_cpu_torch.py", "--extras", "cpu", "--index", index, *pins)
    run(binaries / "pip", "install", "-q", "-c", ROOT / "constraints.txt", f"{wheel}[cpu]", environment=environment)
    missing = run(binaries / "python", "-P", "-c", "from kernels.cpu import native; print(native.missing_reason())")
    assert missing.strip() == "None"
    port = free_port()
    command = [binaries / "pdserve", "up", "--port", str(port), "--log-dir", tmp_path / "logs"]
    with (tmp_path / "output").open("wb") as output:
        cluster = subprocess.Popen(command, cwd=tmp_path, stdout=output, stderr=output, env=environment)
    try:
        ready = "until grep -q '^Ready after' output; do kill -0 $0 || exit 1; sleep 0.2; done"
        wait = subprocess.run(["sh", "-c", ready, str(cluster.pid)], cwd=tmp_path, check=False, timeout=300)
        assert wait.returncode == 0, (tmp_path / "output").read_text()
        load = Load(port, max_tokens=8)
        load.stream(0)
        assert load.failures() == []
        cluster.send_signal(signal.SIGINT)
        assert cluster.wait(timeout=60) == 0
    finally:
        if cluster.poll() is None:
            cluster.kill()
            cluster.wait()
        shutil.rmtree(tmp_path / "venv")
