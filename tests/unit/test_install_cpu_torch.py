"""The choice of torch's build at installation, with real pip and index servers of this test."""

from __future__ import annotations

import io
import os
import socket
import subprocess
import sys
import threading
import venv
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pip
import pytest

from install_cpu_torch import is_for_cpu, pinned_version, pip_finds_cpu_build

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the choice exists on Linux only")


@pytest.mark.parametrize(
    ("extras", "expected"),
    [("cpu,dev", True), ("cpu", True), ("cuda13,dev", False), ("dev", False), ("cpu,cuda12", False)],
)
def test_only_extras_for_the_cpu_alone_take_its_build(extras: str, expected: bool) -> None:
    assert is_for_cpu(extras) is expected


def test_the_version_is_the_pinned_one() -> None:
    assert pinned_version("a==1\ntorch==2.13.0\ntorchvision==1\n") == "2.13.0"
    assert pinned_version("# torch==1\n") is None
    assert pinned_version((ROOT / "constraints.txt").read_text()) is not None


@pytest.mark.parametrize(
    ("listing", "expected"),
    [
        ("Available versions: 2.13.0+cpu, 2.13.0, 2.12.0+cu126", True),
        ("Available versions: 2.14.0+cpu, 2.13.0", False),
        ("Available versions: 2.13.0+cpu, 2.13.0+cu130", False),
        ("", False),
    ],
)
def test_what_pip_prefers_is_read_from_its_list(listing: str, expected: bool) -> None:
    assert pip_finds_cpu_build(listing, "2.13.0") is expected


class Index:
    """A package index that has one build of torch, or nothing, and records what was requested."""

    def __init__(self, version: str | None) -> None:
        self._version = version
        self.requests: list[str] = []
        self.url = ""

    def page(self, path: str) -> bytes | None:
        """The content of a page; None if there is none."""
        self.requests.append(path)
        if self._version is None or not path.startswith("/torch/"):
            return None
        name = f"torch-{self._version}-py3-none-any.whl"
        if path == "/torch/":
            return f'<a href="{name.replace("+", "%2B")}">{name}</a>'.encode()
        info, content = f"torch-{self._version}.dist-info", io.BytesIO()
        with zipfile.ZipFile(content, "w") as archive:
            archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {self._version}\n")
            archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            archive.writestr(f"{info}/RECORD", f"{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
        return content.getvalue()


@contextmanager
def serving(version: str | None) -> Iterator[Index]:
    index = Index(version)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            content = index.page(self.path)
            self.send_response(404 if content is None else 200)
            self.send_header("Content-Type", "text/html" if self.path.endswith("/") else "application/zip")
            self.send_header("Content-Length", str(len(content or b"")))
            self.end_headers()
            self.wfile.write(content or b"")

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        index.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield index
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """An empty environment that borrows this one's pip."""
    venv.create(tmp_path / "venv", with_pip=False)
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip" / "pip").symlink_to(Path(pip.__file__).parent)
    return tmp_path


def run(environment: Path, index: str, packages: str, *, extras: str = "cpu,dev", answer_s: float = 20.0) -> str:
    """Runs the script as make does, with `packages` as pip's own index; returns its output."""
    (environment / "constraints.txt").write_text("torch==2.13.0\n")
    command = [str(environment / "venv/bin/python"), str(ROOT / "install_cpu_torch.py")]
    command += ["--extras", extras, "--index", index, "--answer-s", str(answer_s)]
    variables = {name: value for name, value in os.environ.items() if not name.upper().startswith(("PIP_", "HTTP"))}
    variables |= {
        "PYTHONPATH": str(environment / "pip"),
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_INDEX_URL": packages,
        "PIP_NO_CACHE_DIR": "1",
        "NO_PROXY": "*",
    }
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=environment, env=variables)
    return done.stdout


def installed(environment: Path) -> list[str]:
    return sorted(path.name for path in environment.glob("venv/lib/python*/site-packages/torch-*.dist-info"))


def test_the_cpu_build_is_installed_where_its_index_can_be_reached(environment: Path) -> None:
    with serving("2.13.0+cpu") as index, serving("2.13.0") as packages:
        assert "Installed torch's CPU build" in run(environment, index.url, packages.url)
        assert installed(environment) == ["torch-2.13.0+cpu.dist-info"]
        # Now that it is there, nothing is requested any more.
        index.requests.clear()
        packages.requests.clear()
        assert run(environment, index.url, packages.url) == ""
        assert index.requests == packages.requests == []


def test_without_a_reachable_index_pip_decides(environment: Path) -> None:
    with socket.socket() as closed, serving("2.13.0") as packages:
        closed.bind(("127.0.0.1", 0))
        said = run(environment, f"http://127.0.0.1:{closed.getsockname()[1]}", packages.url)
    assert "cannot be reached" in said
    assert installed(environment) == []


def test_an_index_that_never_answers_does_not_stop_the_installation(environment: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, serving("2.13.0") as packages:
        said = run(environment, f"http://127.0.0.1:{silent.getsockname()[1]}", packages.url, answer_s=0.3)
    assert "cannot be reached" in said
    assert installed(environment) == []


def test_an_index_without_this_version_leaves_the_choice_to_pip(environment: Path) -> None:
    with serving("2.99.0+cpu") as index, serving("2.13.0") as packages:
        assert "has no torch 2.13.0 for this machine" in run(environment, index.url, packages.url)
    assert installed(environment) == []


def test_where_pip_finds_a_cpu_build_nothing_changes(environment: Path) -> None:
    with serving("2.13.0+cpu") as index, serving("2.13.0+cpu") as packages:
        assert "pip finds torch's CPU build" in run(environment, index.url, packages.url)
        assert index.requests == []
    assert installed(environment) == []


def test_extras_for_gpus_and_an_empty_index_request_nothing(environment: Path) -> None:
    with serving("2.13.0+cpu") as index, serving("2.13.0") as packages:
        assert run(environment, index.url, packages.url, extras="cuda13,dev") == ""
        assert run(environment, "", packages.url) == ""
        assert index.requests == packages.requests == []
