"""Whole services under simulated faults. A failure names a seed: `python -m tests.simulation --seed N` repeats it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.depth import IS_FULL

pytest.importorskip("lupa", reason="Redis scripts need a Lua interpreter: pip install -e '.[dev]'")
#: Mutations, and the episodes of 250 requests and 25 faults within which each is seen.
FOUND = {
    "accept-any-digest": 2,
    "count-usage-twice": 2,
    "forget-a-release": 2,
    "ignore-positions": 2,
    "keep-a-queue-slot": 2,
    "leave-the-older-attempt": 6,
    "let-go-of-blocks-on-the-wire": 2,
    "lose-a-preempted-sequence": 2,
    "send-a-block-twice": 2,
    "share-without-a-copy": 2,
}
_ROOT = Path(__file__).parents[2]


def _simulate(*arguments: str) -> tuple[int, list[dict[str, object]]]:
    command = [sys.executable, "-m", "tests.simulation", *arguments]
    environment = os.environ | {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.stdout, done.stderr
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


def test_a_thousand_requests_under_a_hundred_faults_lose_nothing_repeat_nothing_and_leave_nothing() -> None:
    """Also: what happens is decided by the seed alone, to the last message."""
    status, reports = _simulate("--requests", "1000", "--faults", "100", "--seed", "101", "--replay", "40")
    *episodes, total = reports
    assert [report["violations"] for report in episodes] == [[] for _ in episodes]
    assert total["replays_exactly"] is True
    assert status == 0
    assert sum(report["outcomes"]["done"] for report in episodes) > 900  # type: ignore[index]


@pytest.mark.skipif(not IS_FULL, reason="takes minutes: PDSERVE_TEST_DEPTH=full runs it")
@pytest.mark.parametrize("mutation", FOUND)
def test_a_change_that_breaks_a_promise_is_found(mutation: str) -> None:
    requests = str(250 * FOUND[mutation])
    status, reports = _simulate(
        "--requests", requests, "--faults", requests[:-1], "--seed", "101", "--mutation", mutation
    )
    assert status == 1, f"{len(reports) - 1} episodes saw nothing"
