"""Describes hardware, versions and commit, which are written into every result file."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path

PACKAGES = ("torch", "triton", "transformers", "ucxx-cu13", "libucx-cu13", "grpcio", "aiohttp", "redis", "xxhash")


def describe() -> dict[str, object]:
    """Hardware, versions and the commit; nothing that identifies the machine."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1024**3),
        "kernel": platform.release().split("-")[0],
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "commit": _commit(),
    }


def heading(environment: dict[str, object], unit: str) -> str:
    """The paragraph above a table: unit, hardware, date and commit."""
    return (
        f"{unit} on {environment['cpu']}, {environment['cores']} cores, {environment['date']}, commit "
        f"{environment['commit']}. The machine is shared: ratios are more reliable than absolute values.\n\n"
    )


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    pairs = (line.partition(":") for line in lines)
    fields = {name.strip(): value.strip() for name, _, value in pairs}
    return f"{fields.get('model name', 'unknown')} (family {fields.get('cpu family')}, model {fields.get('model')})"


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str:
    try:
        out = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "unknown"
    return out.stdout.strip() or "unknown"
