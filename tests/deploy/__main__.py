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
#: More failures than this are a fault and no stall.
_MAX_REPEATED = 3
_WITH_CONTAINERS = {"test_images.py", "test_stack.py"}


@dataclass(eq=False)  # pytest keeps plugins in sets.
class Outcomes:
    """Which files had a test that passed, which tests failed, and why tests were skipped."""

    passed: set[str] = field(default_factory=set)
    failed: list[str] = field(default_factory=list)
    #: Tests that failed at first, and passed when they were repeated.
    repeated: list[str] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A hook of pytest, called for each phase of each test."""
        if report.passed and report.when == "call":
            self.passed.add(Path(report.fspath).name)
        if report.failed and report.nodeid not in self.failed:
            self.failed.append(report.nodeid)
        if report.skipped and isinstance(report.longrepr, tuple):
            self.skipped[report.longrepr[2].removeprefix("Skipped: ")] += 1

    def verdict(self, no_engine: str) -> str:
        """The last line of a run. `no_engine`: why there is none; empty: there is one."""
        skipped = [f"{count} skipped: {reason}" for reason, count in self.skipped.items()]
        repeated = [f"passed only when repeated: {name}" for name in self.repeated]
        if self.passed >= _WITH_CONTAINERS:
            notes = "; ".join(skipped + repeated)
            return f"deploy: run ({notes})" if notes else "deploy: run"
        reason = no_engine or "; ".join(skipped) or "no container was asked for"
        return f"deploy: skipped ({'; '.join([reason, 'what needs none has run', *repeated])})"


def main(arguments: list[str]) -> int:
    """Runs pytest with these arguments, by default all tests marked `deploy`. Returns the exit status.

    Up to three tests that failed are repeated, since the grace times and deadlines of whole deployments are real time,
    and a shared machine can stall for seconds. The last line names those that needed it, and says whether containers
    were run.
    """
    outcomes = Outcomes()
    options = ["-m", "deploy", "--timeout", str(_TIMEOUT_S), "--durations", "15"]
    status = pytest.main([*options, *(arguments or ["tests"])], plugins=[outcomes])
    failed = outcomes.failed.copy()
    if status == pytest.ExitCode.TESTS_FAILED and len(failed) <= _MAX_REPEATED:
        print(f"Repeating what failed: {', '.join(failed)}", flush=True)
        outcomes.failed.clear()
        status = pytest.main([*options, *failed], plugins=[outcomes])
        outcomes.repeated = [name for name in failed if name not in outcomes.failed]
    print(outcomes.verdict(why_no_engine()))
    return 0 if status == pytest.ExitCode.NO_TESTS_COLLECTED else int(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
