"""Installs torch's CPU build before everything else, where pip alone would take one with gigabytes of CUDA libraries.

Run by `make install` with the interpreter of `.venv`. It does nothing if an extra for GPUs is requested, if torch is
there, if pip's own configuration leads to a CPU build, or if PyTorch's index cannot be reached: then pip decides.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

#: Seconds for the index to answer. A child process asks it, because a lookup of its name has no time limit.
_ANSWER_S = 4.0
#: Seconds for pip to list what it finds.
_LIST_S = 30.0
_ASK = "import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=float(sys.argv[2])).read(1)"


def pinned_version(constraints: str) -> str | None:
    """The version of torch in a file of constraints."""
    found = re.search(r"^torch==([\w.]+)\s*$", constraints, re.MULTILINE)
    return found[1] if found else None


def is_for_cpu(extras: str) -> bool:
    """Whether the extras need torch, and no GPU."""
    names = {name.strip() for name in extras.split(",")}
    return "cpu" in names and not any(name.startswith("cuda") for name in names)


def is_installed(version: str) -> bool:
    """Whether this environment has torch of that version, in any build."""
    try:
        return importlib.metadata.version("torch").partition("+")[0] == version
    except importlib.metadata.PackageNotFoundError:
        return False


def pip_finds_cpu_build(listing: str, version: str) -> bool:
    """Whether pip would install a CPU build by itself, from the output of `pip index versions torch`.

    Of equal versions pip prefers one with a suffix such as `+cpu`, and among those the last in alphabetical order.
    """
    builds = re.findall(rf"\b{re.escape(version)}\+([\w.]+)", listing)
    return bool(builds) and max(builds) == "cpu"


def _pip(*arguments: str, timeout_s: float | None = None) -> subprocess.CompletedProcess[str] | None:
    """Runs pip; None if it takes too long."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return None


def _answers(index: str, answer_s: float) -> bool:
    """Whether the index has a page for torch."""
    command = [sys.executable, "-c", _ASK, f"{index.rstrip('/')}/torch/", str(answer_s)]
    try:
        return subprocess.run(command, capture_output=True, check=False, timeout=answer_s).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def install(index: str, version: str, *, answer_s: float) -> str:
    """Installs the CPU build from `index` if pip would not find one; returns what was done, in one line."""
    listing = _pip("index", "versions", "torch", "--timeout", "5", "--retries", "1", timeout_s=_LIST_S)
    if listing is not None and pip_finds_cpu_build(listing.stdout, version):
        return "pip finds torch's CPU build."
    if not _answers(index, answer_s):
        return f"{index} cannot be reached or has no torch: pip takes the build of torch that it finds."
    source = ("--index-url", index, "--timeout", "15", "--retries", "1")
    done = _pip("install", "-q", "--no-deps", "--only-binary", "torch", *source, f"torch=={version}")
    if done is not None and done.returncode == 0:
        return f"Installed torch's CPU build from {index}."
    return f"{index} has no torch {version} for this machine: pip takes the build of torch that it finds."


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--extras", required=True, help="extras of pdserve that will be installed")
    parser.add_argument("--index", required=True, help="package index with CPU builds; empty: none")
    parser.add_argument("--constraints", type=Path, default=Path("constraints.txt"), help="file with torch's version")
    parser.add_argument("--answer-s", type=float, default=_ANSWER_S, help="seconds for the index to answer")
    arguments = parser.parse_args()
    version = pinned_version(arguments.constraints.read_text(encoding="utf-8"))
    if version is None or not arguments.index or not is_for_cpu(arguments.extras) or is_installed(version):
        return
    if sys.platform == "linux":  # Elsewhere the package index has no other build.
        print(install(arguments.index, version, answer_s=arguments.answer_s), flush=True)


if __name__ == "__main__":
    main()
