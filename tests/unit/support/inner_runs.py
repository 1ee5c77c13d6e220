"""Runs of pytest inside of tests, with this project's plugins and none of its settings."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.arch.documents import ROOT

CONFTEST = """
from tests.support import outcomes
pytest_addoption = outcomes.add_option
pytest_configure = outcomes.register
"""
SETTINGS = """
[pytest]
markers =
    deploy: as in this project
    real_time: as in this project
"""


def environment() -> dict[str, str]:
    """In which `tests` can be imported from anywhere, and pytest starts with few of the plugins that are installed."""
    plugins = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "pytest_timeout"}
    return {**os.environ, **plugins, "PYTHONPATH": str(ROOT)}


def write(directory: Path, source: str) -> None:
    """A test file `test_here.py` with what its run needs."""
    (directory / "conftest.py").write_text(CONFTEST, encoding="utf-8")
    (directory / "pytest.ini").write_text(SETTINGS, encoding="utf-8")
    (directory / "test_here.py").write_text(source, encoding="utf-8")


def run_pytest(directory: Path, source: str, *options: str) -> subprocess.CompletedProcess[str]:
    """A run of these tests in `directory`."""
    write(directory, source)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options, "test_here.py"]
    return subprocess.run(command, cwd=directory, env=environment(), capture_output=True, text=True, check=False)
