"""Finds the C++ kernels, or says why there are none: then the reference ops run."""

from __future__ import annotations

import importlib
import sysconfig
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

EXTENSION = "kernels.cpu._native"
#: The build leaves it beside this module when it could not make the extension; its text says why.
REASON_FILE = Path(__file__).with_name("_native_missing.txt")


@dataclass(frozen=True, slots=True)
class Missing:
    """No extension; `reason` is for the eyes of whoever started the process."""

    reason: str


def find(extension: str, reason_file: Path) -> ModuleType | Missing:
    """Imports `extension`; when there is none for this Python, the build's own words say why."""
    try:
        return importlib.import_module(extension)
    except ModuleNotFoundError as error:
        if error.name != extension:
            raise
    except ImportError as error:
        return Missing(f"cannot be loaded: {error}")
    try:
        return Missing(f"not built: {reason_file.read_text(encoding='utf-8').strip()}")
    except FileNotFoundError:
        return Missing(f"not built for {sysconfig.get_config_var('SOABI')}: install again")


@cache
def _found() -> ModuleType | Missing:
    return find(EXTENSION, REASON_FILE)


def load() -> ModuleType | None:
    """The extension module, looked for once; None when there is none, and `missing_reason` says why."""
    found = _found()
    return None if isinstance(found, Missing) else found


def missing_reason() -> str | None:
    """Why `load` gives None; None when it gives the module."""
    found = _found()
    return found.reason if isinstance(found, Missing) else None
