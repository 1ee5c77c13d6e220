"""Programs that some tests use and that are not in .venv: promtool, prometheus, chromium, kubectl and the like."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest


def tool(*names: str) -> Path:
    """The first of these programs on the PATH; skips the test where none is."""
    for name in names:
        found = shutil.which(name)
        if found is not None:
            return Path(found)
    pytest.skip(f"none of these programs is installed: {', '.join(names)} (docs/internals/deployment-tests.md)")
