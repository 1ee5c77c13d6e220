"""Which failures are waits, and what is known of each test afterwards."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.outcomes import Outcome, is_wait, read
from tests.unit.support.inner_runs import run_pytest

DID_NOT_HAPPEN = AssertionError("did not happen within 60 s: all blocks are released; decode-0: 3 running")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (TimeoutError(), True),
        (subprocess.TimeoutExpired("pdserve", 60), True),
        (DID_NOT_HAPPEN, True),
        (pytest.fail.Exception("Timeout (>600.0s) from pytest-timeout."), True),
        (ExceptionGroup("unhandled", [TimeoutError(), ExceptionGroup("more", [DID_NOT_HAPPEN])]), True),
        (ExceptionGroup("unhandled", [TimeoutError(), AssertionError("assert 1 == 2")]), False),
        (AssertionError("assert 'Berlin' == 'Paris'"), False),
        (AssertionError("assert it did not happen within 60 s"), False),
        (ConnectionResetError(), False),
        (KeyError("x"), False),
    ],
)
def test_only_what_was_waited_for_in_vain_is_a_wait(error: BaseException, expected: bool) -> None:
    assert is_wait(error) is expected


SOURCE = """
import pytest
def test_good(): pass
def test_wrong(): assert [1] == [2]
@pytest.mark.real_time
def test_late(): raise TimeoutError("nothing came")
def test_late_alone(): raise TimeoutError
@pytest.fixture
def leaks():
    yield
    assert False, "a leak"
def test_leaks(leaks): pass
def test_left_out(): pytest.skip("no GPU")
"""


@pytest.mark.parametrize("options", [(), ("-p", "xdist", "-n", "2")])
def test_each_outcome_is_written_with_its_kind(tmp_path: Path, options: tuple[str, ...]) -> None:
    """Fails if pytest-xdist lost what only the process of a test knows."""
    run_pytest(tmp_path, SOURCE, *options, "--outcomes", "outcomes.jsonl")
    found = {(each.test.partition("::")[2], each.outcome): each for each in read(tmp_path / "outcomes.jsonl")}
    assert set(found) == {
        ("test_good", "passed"),
        ("test_wrong", "failed"),
        ("test_late", "failed"),
        ("test_late_alone", "failed"),
        ("test_leaks", "passed"),
        ("test_leaks", "failed"),
        ("test_left_out", "skipped"),
    }
    kinds = {name: (each.is_wait, each.is_real_time) for (name, outcome), each in found.items() if outcome == "failed"}
    assert kinds == {
        "test_wrong": (False, False),
        "test_late": (True, True),
        "test_late_alone": (True, False),
        "test_leaks": (False, False),
    }
    messages = {name: each.message for (name, outcome), each in found.items() if outcome != "passed"}
    assert messages["test_late"] == "TimeoutError: nothing came"
    assert messages["test_leaks"].startswith("AssertionError: a leak")
    assert messages["test_left_out"] == "no GPU"
    assert all(each.ended_at >= each.started_at > 1e9 for each in found.values())


def test_a_file_that_cannot_be_imported_is_a_failure_and_no_wait(tmp_path: Path) -> None:
    run_pytest(tmp_path, "import no_such_module\n", "--outcomes", "outcomes.jsonl")
    [failure] = read(tmp_path / "outcomes.jsonl")
    assert failure.test == "test_here.py"
    assert (failure.outcome, failure.is_wait) == ("failed", False)


def test_without_a_run_there_are_no_outcomes(tmp_path: Path) -> None:
    assert list(read(tmp_path / "none.jsonl")) == []


def test_seconds_are_those_of_the_phase() -> None:
    assert Outcome(test="t", outcome="passed", started_at=10.0, ended_at=12.5).seconds == 2.5
