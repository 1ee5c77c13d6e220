"""`make test-deploy`: the tests marked `deploy`, which need programs that `make test` does without.

`--ci` chooses those that `.ci/run` runs: what a change breaks most, at a price worth paying each time.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence

import pytest

from tests.deploy.engine import why_no_engine
from tests.support.lanes import Command, Run, run_lanes
from tests.support.outcomes import Outcome

#: For one test with what it prepares; the first one with containers builds the images.
_TIMEOUT_S = 1200
_OPTIONS = ("--timeout", str(_TIMEOUT_S))
_WITH_CONTAINERS = {"test_images.py", "test_stack.py"}
#: What `--ci` stands for.
_CI = (
    *("-m", "deploy and not nightly"),
    "tests/deploy/test_images.py",
    "tests/deploy/test_stack.py",
    "tests/deploy/test_kubernetes_commands.py",
    "tests/deploy/test_wheel.py",
    "tests/deploy/test_console.py",
    "tests/deploy/test_console_keys.py",
    "tests/deploy/test_reference_page.py",
)


def verdict(outcomes: Sequence[Outcome], repeated: Sequence[str], no_engine: str) -> str:
    """The last line of a run. `no_engine`: why there is none; empty: there is one."""
    passed = {each.test.split("::")[0].rpartition("/")[2] for each in outcomes if each.outcome == "passed"}
    counts = Counter(each.message for each in outcomes if each.outcome == "skipped")
    skipped = [f"{count} skipped: {reason}" for reason, count in counts.items()]
    again = [f"passed only when repeated: {name}" for name in repeated]
    if passed >= _WITH_CONTAINERS:
        notes = "; ".join(skipped + again)
        return f"deploy: run ({notes})" if notes else "deploy: run"
    reason = no_engine or "; ".join(skipped) or "no container was asked for"
    return f"deploy: skipped ({'; '.join([reason, 'what needs none has run', *again])})"


def _succeeded(run: Run) -> bool:
    return run.succeeded or all(each.exit_status in (0, pytest.ExitCode.NO_TESTS_COLLECTED) for each in run.ended)


def main(arguments: Sequence[str]) -> int:
    """Runs pytest with these arguments, by default all tests marked `deploy`. Returns the exit status.

    What may be repeated is what `make test` would repeat. The last line names it, and says whether containers were run.
    """
    chosen = _CI if list(arguments) == ["--ci"] else arguments or ["tests"]
    command = Command(
        arguments=("pytest", "-m", "deploy", *_OPTIONS, "--durations=50", *chosen),
        repeat_options=_OPTIONS,
    )
    run = run_lanes({"deploy": (command,)})
    [ended] = run.ended
    print(verdict(ended.outcomes, run.repeated, why_no_engine()))
    return 0 if _succeeded(run) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
