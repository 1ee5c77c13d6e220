"""Has CMake build the C++ kernels. Where they cannot be built the install goes on without them and leaves the reason.

Everything else about the project stands in pyproject.toml.
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
#: `kernels.cpu.native` reads it; there only when the extension is not.
REASON_FILE = "_native_missing.txt"


class BuildError(Exception):
    """A step of the build failed; the message is the line that says why."""


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
            message = f"The C++ kernels were not built ({error}). pdserve works without them, more slowly."
            warnings.warn(message, stacklevel=1)
        else:
            # Renamed into place: whoever runs the old one has it mapped.
            fresh = target.with_suffix(".fresh")
            shutil.copy2(built, fresh)
            fresh.replace(target)
            reason.unlink(missing_ok=True)

    def _build(self, name: str) -> Path:
        """Configures and compiles in a directory of this Python's own, kept so that the next build is short."""
        directory = Path("build") / f"cmake-{name.split('.')[1]}"
        # Ninja's path changes with each isolated build. CXXFLAGS could bring -ffast-math, and with it other bits.
        configure = [
            *("-S", str(CPU), "-B", str(directory), "-G", "Ninja"),
            *(f"-DCMAKE_MAKE_PROGRAM={shutil.which('ninja') or 'ninja'}", f"-DPython_EXECUTABLE={sys.executable}"),
            *("-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_CXX_FLAGS="),
        ]
        try:
            self._cmake(*configure)
        except BuildError:
            # What an earlier build wrote down may be wrong by now: the tree was moved, a compiler came or went.
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
    """The first complaint in what CMake or a compiler printed, on one line."""
    complaint = re.search(
        r"^CMake Error.*\n(?P<cmake>(?:(?: .*)?\n)+)|^(?P<compiler>.*\berror: .*)$", output, re.MULTILINE
    )
    text = (complaint["cmake"] or complaint["compiler"]) if complaint else output
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
