"""`make test-deploy`: the tests marked `deploy`, which need programs that `make test` does without."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.deploy.engine import why_no_engine

#: For one test with what it prepares; the first one with containers builds the images.
_TIMEOUT_S = 1200
_WITH_CONTAINERS = {"test_images.py", "test_stack.py"}


@dataclass(eq=False)  # pytest keeps plugins in sets.
class Outcomes:
    """Which files had a test that passed, and why tests were skipped."""

    passed: set[str] = field(default_factory=set)
    skipped: Counter[str] = field(default_factory=Counter)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A hook of pytest, called for each phase of each test."""
        if report.passed and report.when == "call":
            self.passed.add(Path(report.fspath).name)
        if report.skipped and isinstance(report.longrepr, tuple):
            self.skipped[report.longrepr[2].removeprefix("Skipped: ")] += 1

    def verdict(self, no_engine: str) -> str:
        """The last line of a run. `no_engine`: why there is none; empty: there is one."""
        reasons = "; ".join(f"{count} skipped: {reason}" for reason, count in self.skipped.items())
        if self.passed >= _WITH_CONTAINERS:
            return f"deploy: run ({reasons})" if reasons else "deploy: run"
        return f"deploy: skipped ({no_engine or reasons or 'no container was asked for'}; what needs none has run)"


def main(arguments: list[str]) -> int:
    """Runs pytest with these arguments, by default all tests marked `deploy`. Returns the exit status.

    The last line says whether containers were run.
    """
    outcomes = Outcomes()
    options = ["-m", "deploy", "--timeout", str(_TIMEOUT_S), "--durations", "15"]
    status = pytest.main([*options, *(arguments or ["tests"])], plugins=[outcomes])
    print(outcomes.verdict(why_no_engine()))
    return 0 if status == pytest.ExitCode.NO_TESTS_COLLECTED else int(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
