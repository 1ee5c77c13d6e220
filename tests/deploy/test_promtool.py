"""promtool accepts the rules, and its tests of every alert firing and not firing pass."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.deploy.catalog import RULES
from tests.support.tools import tool

pytestmark = pytest.mark.deploy

TESTS = Path(__file__).parent / "rules"


def _promtool(*arguments: object) -> None:
    command = [str(tool("promtool")), *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_rules_are_valid() -> None:
    _promtool("check", "rules", *sorted(RULES.glob("*.yaml")))


@pytest.mark.parametrize("path", sorted(TESTS.glob("*.yaml")), ids=lambda path: path.name)
def test_the_rules_fire_and_are_silent_as_expected(path: Path) -> None:
    _promtool("test", "rules", path)
