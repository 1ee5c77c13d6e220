"""Loads the C++ kernels, or reports why there are none. The reference ops run in that case."""

from __future__ import annotations

import importlib
import sysconfig
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

EXTENSION = "kernels.cpu._native"
#: Written by the build, next to this module, when it cannot make the extension; its text is the reason.
REASON_FILE = Path(__file__).with_name("_native_missing.txt")


@dataclass(frozen=True, slots=True)
class Missing:
    """There is no extension; `reason` is a text for the user."""

    reason: str


def find(extension: str, reason_file: Path) -> ModuleType | Missing:
    """Imports `extension`; when there is none for this Python, the reason is the one that the build has written."""
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
        return Missing(f"not built for {sysconfig.get_config_var('SOABI')}: install pdserve again")


@cache
def _found() -> ModuleType | Missing:
    return find(EXTENSION, REASON_FILE)


def load() -> ModuleType | None:
    """The extension module; None when there is none, and `missing_reason` has the reason."""
    found = _found()
    return None if isinstance(found, Missing) else found


def missing_reason() -> str | None:
    """Why `load` returns None; None when it returns the module."""
    found = _found()
    return found.reason if isinstance(found, Missing) else None
