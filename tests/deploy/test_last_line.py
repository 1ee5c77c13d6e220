"""The last line of `make test-deploy` says whether containers ran."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.arch.documents import ROOT
from tests.deploy.__main__ import Outcomes

CONTAINERS = {"test_images.py", "test_stack.py"}


@pytest.mark.parametrize(
    ("passed", "skipped", "no_engine", "line"),
    [
        (CONTAINERS, {}, "", "deploy: run"),
        (CONTAINERS, {"no chromium": 3}, "", "deploy: run (3 skipped: no chromium)"),
        ({"test_rules.py"}, {}, "", "deploy: skipped (no container was asked for; what needs none has run)"),
        ({"test_images.py"}, {"no base": 9}, "", "deploy: skipped (9 skipped: no base; what needs none has run)"),
        (set(), {"no docker": 9}, "no docker here", "deploy: skipped (no docker here; what needs none has run)"),
    ],
)
def test_run_is_said_only_when_images_and_stack_ran(
    passed: set[str], skipped: dict[str, int], no_engine: str, line: str
) -> None:
    assert Outcomes(passed=passed, skipped=Counter(skipped)).verdict(no_engine) == line


def test_pytest_takes_the_outcomes_as_a_plugin() -> None:
    assert {Outcomes()}


def run_deploy(directory: Path, source: str) -> subprocess.CompletedProcess[str]:
    (directory / "test_here.py").write_text(source, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.deploy", "-p", "no:cacheprovider", "test_here.py"]
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False)


def test_what_fails_once_is_repeated_and_named(tmp_path: Path) -> None:
    """Fails without the repetition, and if a test that fails again were forgiven."""
    source = """
import pathlib, pytest
@pytest.mark.deploy
def test_unsteady():
    seen = pathlib.Path("seen")
    was_there = seen.exists()
    seen.touch()
    assert was_there
"""
    done = run_deploy(tmp_path, source)
    assert done.returncode == 0, done.stdout
    assert "passed only when repeated: test_here.py::test_unsteady" in done.stdout.splitlines()[-1]
    done = run_deploy(tmp_path, "import pytest\n@pytest.mark.deploy\ndef test_broken():\n    assert False\n")
    assert done.returncode == 1
    assert "passed only when repeated" not in done.stdout
