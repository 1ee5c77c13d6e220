"""Everything that an installed pdserve reads is in the wheel."""

from __future__ import annotations

import subprocess
import tomllib
from fnmatch import fnmatch
from pathlib import PurePath

from tests.arch.documents import ROOT

SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]


def _is_source_of_the_kernels(name: str) -> bool:
    return name.startswith("kernels/cpu/") and name.endswith((".cpp", ".h", "CMakeLists.txt"))


def test_every_file_of_a_package_is_code_package_data_or_source_of_the_kernels() -> None:
    packages = [pattern.removesuffix("*") for pattern in SETUPTOOLS["packages"]["find"]["include"]]
    listed = subprocess.run(["git", "ls-files", *packages], cwd=ROOT, capture_output=True, text=True, check=True)
    names = listed.stdout.splitlines()
    assert len(names) > 100
    missing = []
    for name in names:
        if name.endswith(".py") or _is_source_of_the_kernels(name):
            continue
        # A pattern is meant relative to a package, which is every directory with an __init__.py above the file.
        candidates = [
            (parent, name.removeprefix(f"{parent}/"))
            for parent in map(str, PurePath(name).parents)
            if (ROOT / parent / "__init__.py").exists()
        ]
        patterns = [
            (pattern, path)
            for package, found in SETUPTOOLS["package-data"].items()
            for pattern in found
            for parent, path in candidates
            if package in ("*", parent.replace("/", "."))
        ]
        if not any(fnmatch(path, pattern) and path.count("/") == pattern.count("/") for pattern, path in patterns):
            missing.append(name)
    assert missing == [], "add them to [tool.setuptools.package-data]"
