"""How the C++ kernels are built, installed and found, and what happens where they cannot be built."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

from kernels.cpu import native

ROOT = Path(__file__).parents[3]
Build = Callable[[str], Path]


@pytest.fixture
def build(tmp_path: Path) -> Build:
    """Runs the build with a `cmake` that is the given shell script; returns the package directory that it filled."""

    def run(cmake: str) -> Path:
        tools = tmp_path / "tools"
        tools.mkdir(exist_ok=True)
        (tools / "cmake").write_text(f"#!/bin/sh\n{cmake}\n", encoding="utf-8")
        (tools / "cmake").chmod(0o755)
        project = tmp_path / "project"
        if not project.exists():
            shutil.copytree(ROOT / "kernels", project / "kernels", ignore=shutil.ignore_patterns("_native*"))
            shutil.copy(ROOT / "setup.py", project)
        subprocess.run(
            [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", "lib"],
            cwd=project,
            env={**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"},
            capture_output=True,
            check=True,
        )
        return project / "lib" / "kernels" / "cpu"

    return run


NO_COMPILER = """
cat <<END
-- The CXX compiler identification is unknown
CMake Error at CMakeLists.txt:3 (project):
  No CMAKE_CXX_COMPILER could be found.

  Tell CMake where to find the compiler by setting either the environment
  variable "CXX" or the CMake cache entry CMAKE_CXX_COMPILER.

-- Configuring incomplete, errors occurred!
END
exit 1"""

BROKEN_SOURCE = """
case "$1" in --build)
  echo "[1/2] Building CXX object gemm.cpp.o"
  echo "src/isa/gemm.cpp:7:3: error: 'vmax' was not declared in this scope"
  echo "ninja: build stopped: subcommand failed."
  exit 1
esac"""

BUILT = f"""
case "$1" in
  --build) echo code > "$2/_native{sysconfig.get_config_var("EXT_SUFFIX")}" ;;
  *) mkdir -p "$4" ;;
esac"""

#: Configures once; a second time in the same directory fails.
BUILT_ONCE = f"""
if test "$1" = -S && test -e "$4"; then echo "CMake Error: another source directory"; exit 1; fi
{BUILT}"""


@pytest.mark.parametrize(
    ("cmake", "reason"),
    [
        (NO_COMPILER, "No CMAKE_CXX_COMPILER could be found."),
        (BROKEN_SOURCE, "src/isa/gemm.cpp:7:3: error: 'vmax' was not declared in this scope"),
    ],
)
def test_a_build_that_fails_installs_its_reason_instead_of_the_extension(build: Build, cmake: str, reason: str) -> None:
    package = build(cmake)
    assert [path.name for path in package.iterdir()] == ["_native_missing.txt"]
    found = native.find("kernels.cpu.not_there", package / "_native_missing.txt")
    assert found == native.Missing(f"not built: {reason}")


def test_extension_and_reason_file_replace_each_other(build: Build) -> None:
    names = [[path.name for path in build(cmake).iterdir()] for cmake in (NO_COMPILER, BUILT, NO_COMPILER)]
    extension = f"_native{sysconfig.get_config_var('EXT_SUFFIX')}"
    assert names == [["_native_missing.txt"], [extension], ["_native_missing.txt"]]


def test_a_stale_cmake_cache_of_an_earlier_build_is_deleted(build: Build) -> None:
    for _ in range(2):
        assert [path.suffix for path in build(BUILT_ONCE).iterdir()] == [".so"]


def test_an_extension_for_another_python_is_reported_with_what_to_do(tmp_path: Path) -> None:
    found = native.find("kernels.cpu.not_there", tmp_path / "no_reason.txt")
    assert found == native.Missing(f"not built for {sysconfig.get_config_var('SOABI')}: install pdserve again")


def test_an_extension_that_cannot_be_loaded_is_reported_with_the_loaders_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"broken_extension{sysconfig.get_config_var('EXT_SUFFIX')}").write_bytes(b"no shared object")
    monkeypatch.syspath_prepend(tmp_path)
    found = native.find("broken_extension", tmp_path / "no_reason.txt")
    assert isinstance(found, native.Missing)
    assert found.reason.startswith("cannot be loaded: ")
    assert "broken_extension" in found.reason


def test_there_is_a_module_or_a_reason_and_never_torch() -> None:
    code = (
        "import sys; from kernels.cpu import native;"
        "print((native.load() is None) == (native.missing_reason() is not None), 'torch' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "True False"


def test_changed_sources_are_built_by_make() -> None:
    for source in ("kernels/cpu/CMakeLists.txt", "kernels/cpu/src/kernels.h", "kernels/cpu/src/isa/vec.h"):
        out = subprocess.run(
            ["make", "-n", "-W", source, "install"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        assert "pip install" in out.stdout, source


def test_code_outside_of_an_instruction_sets_namespace_does_not_use_it() -> None:
    """The linker keeps one copy of an inline function. One compiled for AVX would crash on a machine without it."""
    module = native.load()
    objdump = shutil.which("objdump")
    if module is None or objdump is None or os.uname().machine != "x86_64":
        pytest.skip("needs the extension, objdump and x86-64")
    assert module.__file__ is not None
    command = [objdump, "-d", "-C", "--no-show-raw-insn", module.__file__]
    code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    functions = re.split(r"^[0-9a-f]+ <(.*)>:$", code, flags=re.MULTILINE)
    own = re.compile(r"\b(pdserve::)?(avx2|avx512|avx512_bf16)::")
    wide = re.compile(r"%[yz]mm|%k[1-7]|\tv[a-z0-9]+ ")
    needing = [name for name, body in zip(functions[1::2], functions[2::2], strict=True) if wide.search(body)]
    assert needing
    assert [name for name in needing if not own.search(name)] == []
