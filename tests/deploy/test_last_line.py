"""The last line of `make test-deploy` says whether containers ran."""

from __future__ import annotations

from collections import Counter

import pytest

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
