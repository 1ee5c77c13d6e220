"""Describes the client's machine and versions, on which a result depends. Nothing identifies the machine."""

from __future__ import annotations

import importlib.metadata
import platform
from datetime import datetime
from pathlib import Path

import psutil

from pdserve import __version__
from pdserve.observe.machine import available_cores

_CPUINFO = Path("/proc/cpuinfo")


def describe_client(now: datetime) -> dict[str, object]:
    """Hardware and versions of the benchmark's client; the server may run elsewhere."""
    cores = available_cores()
    return {
        "date": now.isoformat(timespec="seconds"),
        "cpu": cpu_model(_CPUINFO),
        "cores": cores.usable,
        "memory_gib": round(psutil.virtual_memory().total / 1024**3),
        "system": f"{platform.system()} {platform.release().split('-')[0]} {platform.machine()}",
        "python": platform.python_version(),
        "pdserve": __version__,
        "aiohttp": importlib.metadata.version("aiohttp"),
    }


def cpu_model(cpuinfo: Path) -> str:
    """Name, family and model of the processor; a hypervisor may hide the name."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    name = fields.get("model name", "unknown")
    return f"{name} (family {fields.get('cpu family', '?')}, model {fields.get('model', '?')})"
