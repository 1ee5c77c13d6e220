"""Builds the C++ kernels with CMake. If that fails, the install continues without them and records the reason.

Everything else about the project is in pyproject.toml.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

CPU = Path("kernels/cpu")
#: Read by `kernels.cpu.native`; exists only when the extension does not.
REASON_FILE = "_native_missing.txt"


class BuildError(Exception):
    """A step of the build failed; the message is the line with the cause."""


class BuildNative(build_ext):
    """Builds `kernels.cpu._native`, into the source tree for editable installs, and never fails an install."""

    def run(self) -> None:
        [extension] = self.extensions
        root = Path() if self.inplace else Path(self.build_lib)
        target = root / self.get_ext_filename(extension.name)
        reason = target.parent / REASON_FILE
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            built = self._build(target.name)
        except (BuildError, OSError) as error:
            target.unlink(missing_ok=True)
            reason.write_text(f"{error}\n", encoding="utf-8")
            message = f"The C++ kernels were not built ({error}). pdserve works without them, but more slowly."
            warnings.warn(message, stacklevel=1)
        else:
            # Renamed into place, because running processes have the old file mapped.
            fresh = target.with_suffix(".fresh")
            shutil.copy2(built, fresh)
            fresh.replace(target)
            reason.unlink(missing_ok=True)

    def _build(self, name: str) -> Path:
        """Configures and compiles in a directory for this Python version, which is kept to speed up the next build."""
        directory = Path("build") / f"cmake-{name.split('.')[1]}"
        # Ninja's path changes with each isolated build. CXXFLAGS could add -ffast-math, which would change the bits.
        configure = [
            *("-S", str(CPU), "-B", str(directory), "-G", "Ninja"),
            *(f"-DCMAKE_MAKE_PROGRAM={shutil.which('ninja') or 'ninja'}", f"-DPython_EXECUTABLE={sys.executable}"),
            *("-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_CXX_FLAGS="),
        ]
        try:
            self._cmake(*configure)
        except BuildError:
            # The cache of an earlier build may be stale: the tree was moved, or a compiler was added or removed.
            shutil.rmtree(directory, ignore_errors=True)
            self._cmake(*configure)
        self._cmake("--build", str(directory), "--parallel", str(os.cpu_count() or 1))
        return directory / name

    def _cmake(self, *arguments: str) -> None:
        try:
            done = subprocess.run(
                ["cmake", *arguments],
                check=False,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
        except OSError as error:
            raise BuildError(f"cmake: {error.strerror}") from error
        self.announce(done.stdout, level=2)
        if done.returncode != 0:
            raise BuildError(_why(done.stdout))


def _why(output: str) -> str:
    """The first error in the output of CMake or a compiler, on one line."""
    match = re.search(r"^CMake Error.*\n(?P<cmake>(?:(?: .*)?\n)+)|^(?P<compiler>.*\berror: .*)$", output, re.MULTILINE)
    text = (match["cmake"] or match["compiler"]) if match else output
    first, *_ = re.split(r"(?<=\.) ", " ".join(text.split()))
    return textwrap.shorten(first, 300)


setup(
    ext_modules=[
        Extension(
            "kernels.cpu._native",
            sources=sorted(str(path) for path in CPU.glob("src/**/*.cpp")),
            depends=[str(CPU / "CMakeLists.txt"), *sorted(str(path) for path in CPU.glob("src/**/*.h"))],
        )
    ],
    cmdclass={"build_ext": BuildNative},
)
