"""The last line of `make test-deploy` says whether containers ran, and what passed only when it was repeated."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.__main__ import verdict
from tests.support.outcomes import Outcome
from tests.unit.support import inner_runs

CONTAINERS = {"test_images.py", "test_stack.py"}


def outcomes(passed: set[str], skipped: dict[str, int]) -> list[Outcome]:
    ran = [Outcome(test=f"tests/deploy/{name}::test", outcome="passed", started_at=0, ended_at=1) for name in passed]
    return ran + [
        Outcome(
            test=f"tests/deploy/test_x.py::test[{number}]", outcome="skipped", started_at=0, ended_at=0, message=why
        )
        for why, count in skipped.items()
        for number in range(count)
    ]


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
    assert verdict(outcomes(passed, skipped), (), no_engine) == line


def run_deploy(directory: Path, source: str) -> subprocess.CompletedProcess[str]:
    inner_runs.write(directory, source)
    command = [sys.executable, "-m", "tests.deploy", "-p", "no:cacheprovider", "test_here.py"]
    return subprocess.run(
        command, cwd=directory, env=inner_runs.environment(), capture_output=True, text=True, check=False
    )


def test_a_wait_that_passes_when_it_is_repeated_is_named_and_a_wrong_result_stays_wrong(tmp_path: Path) -> None:
    """Fails without the repetition, and if a wrong result were forgiven."""
    unsteady = """
import pathlib, pytest
pytestmark = [pytest.mark.deploy, pytest.mark.real_time]
def test_unsteady():
    seen = pathlib.Path("seen")
    was_there = seen.exists()
    seen.touch()
    if not was_there: raise {error}
"""
    done = run_deploy(tmp_path, unsteady.replace("{error}", "TimeoutError"))
    assert done.returncode == 0, done.stdout
    assert "passed only when repeated: test_here.py::test_unsteady" in done.stdout.splitlines()[-1]
    (tmp_path / "seen").unlink()
    done = run_deploy(tmp_path, unsteady.replace("{error}", "AssertionError"))
    assert done.returncode == 1
    assert "passed only when repeated" not in done.stdout
