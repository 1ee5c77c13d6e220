"""Whole services under simulated faults. A failure names a seed: `python -m tests.simulation --seed N` repeats it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.depth import IS_FULL

pytest.importorskip("lupa", reason="Redis scripts need a Lua interpreter: pip install -e '.[dev]'")
from tests.simulation.clients import ENDED_BY_CLIENT

#: Mutations, and the episodes of 250 requests and 25 faults within which each is seen.
FOUND = {
    "accept-any-digest": 2,
    "count-usage-twice": 2,
    "damage-a-copy": 2,
    "forget-a-release": 2,
    "ignore-positions": 2,
    "keep-a-queue-slot": 2,
    "leave-the-older-attempt": 2,
    "let-go-of-blocks-on-the-wire": 2,
    "lose-a-preempted-sequence": 2,
    "replay-no-recovered-tokens": 2,
    "replay-no-tokens": 2,
    "send-a-block-twice": 2,
    "share-without-a-copy": 2,
    "write-in-the-attempt": 3,
}
#: Mutations that 40 requests without faults show; each takes seconds.
ALL_IN_CALM = ("ignore-cancels", "ignore-deadlines", "let-go-late", "repeat-what-a-client-has", "send-a-block-twice")
FOUND_IN_CALM = ALL_IN_CALM if IS_FULL else ()
#: Each of 250 requests and 25 faults.
NUM_EPISODES = 4 if IS_FULL else 2
_ROOT = Path(__file__).parents[2]


def _simulate(*arguments: str) -> tuple[int, list[dict[str, Any]]]:
    command = [sys.executable, "-m", "tests.simulation", *arguments]
    environment = os.environ | {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.stdout, done.stderr
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


def test_requests_under_faults_lose_nothing_repeat_nothing_and_leave_nothing() -> None:
    """Also: what happens is decided by the seed alone, to the last message; what clients end is gone at once."""
    arguments = f"--requests {250 * NUM_EPISODES} --faults {25 * NUM_EPISODES} --seed 1401 --calm 120"
    arguments += f" --replay {40 if IS_FULL else 20} --must-find"
    status, reports = _simulate(*arguments.split(), ",".join(FOUND_IN_CALM))
    episodes, calm, *mutated, total = reports[:NUM_EPISODES], *reports[NUM_EPISODES:]
    assert [report["violations"] for report in episodes] == [[] for _ in episodes]
    assert total["replays_exactly"] is True
    assert calm["violations"] == []
    assert [report["mutation"] for report in mutated if report["found"]] == [*FOUND_IN_CALM]
    assert status == 0
    outcomes: Counter[str] = sum((Counter(report["outcomes"]) for report in episodes), Counter())
    assert outcomes["done"] > 200 * NUM_EPISODES
    assert outcomes["joined"] > 5
    phases: Counter[str] = sum((Counter(report["phases_hit"]) for report in episodes), Counter())
    assert {*phases} >= {"move", "hand-off", "commit", "copies", "reuse"}
    assert outcomes["done"] + sum(outcomes[outcome] for outcome in ENDED_BY_CLIENT) > 950 * NUM_EPISODES / 4
    assert all(calm["outcomes"][outcome] > 5 for outcome in ENDED_BY_CLIENT)


@pytest.mark.skipif(not IS_FULL, reason="takes minutes: `make test-all ARGS=searches` runs it")
@pytest.mark.parametrize("mutation", FOUND)
def test_a_change_that_breaks_a_promise_is_found(mutation: str) -> None:
    requests = str(250 * FOUND[mutation])
    status, reports = _simulate(
        "--requests", requests, "--faults", requests[:-1], "--seed", "101", "--mutation", mutation
    )
    assert status == 1, f"{len(reports) - 1} episodes saw nothing"
