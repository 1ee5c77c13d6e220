"""What a run of lanes repeats, and what it says of failures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.lanes import Command, Ended, Run, counted, may_repeat, run_lanes
from tests.support.outcomes import Outcome
from tests.unit.support import inner_runs

PYTEST, LINT = Command(arguments=("pytest", "tests")), Command(arguments=("ruff", "check"))


def outcome(test: str, state: str = "failed", *, is_wait: bool = True, is_real_time: bool = True) -> Outcome:
    return Outcome(
        test=test,
        outcome=state,  # type: ignore[arg-type]
        started_at=1.0,
        ended_at=2.0,
        is_wait=is_wait,
        is_real_time=is_real_time,
    )


def ended(*outcomes: Outcome, status: int = 1, command: Command = PYTEST) -> Ended:
    return Ended(lane="lane", command=command, exit_status=status, outcomes=outcomes)


GOOD = ended(outcome("good", "passed"), status=0)


@pytest.mark.parametrize(
    ("results", "expected"),
    [
        ([GOOD], False),
        ([GOOD, ended(outcome("a"))], True),
        ([ended(outcome("a"), outcome("b")), ended(outcome("c"))], True),
        ([ended(outcome("a"), outcome("a"), outcome("b"), outcome("c"))], True),
        ([ended(outcome("a"), outcome("b")), ended(outcome("c"), outcome("d"))], False),
        ([ended(outcome("a"), outcome("b", is_wait=False))], False),
        ([ended(outcome("a", is_real_time=False))], False),
        # A process of pytest has crashed, or the run was interrupted.
        ([ended(outcome("a"), status=2)], False),
        ([ended(outcome("a")), ended(status=1)], False),
        ([ended(outcome("a")), ended(status=1, command=LINT)], False),
    ],
)
def test_only_a_few_waits_on_the_real_clock_are_repeated(results: list[Ended], expected: bool) -> None:
    assert may_repeat(results) is expected


def test_a_run_succeeds_if_all_that_failed_passed_again() -> None:
    failed = ended(outcome("good", "passed"), outcome("a"))
    assert Run(ended=[GOOD, failed], repeated=["a"]).succeeded
    assert not Run(ended=[GOOD, failed], repeated=[]).succeeded
    assert not Run(ended=[failed, ended(command=LINT)], repeated=["a"]).succeeded


def test_a_test_counts_once_and_as_failed_if_one_of_its_phases_failed() -> None:
    run = Run(ended=[ended(outcome("a", "passed"), outcome("a"), outcome("b", "skipped"), outcome("c"))], repeated=[])
    assert counted(run.counts) == "0 passed, 2 failed, 1 skipped"
    assert counted(Run(ended=run.ended, repeated=["c"]).counts) == "1 passed, 1 failed, 1 skipped"


#: Fails as often as the file says, by a wait.
LATE = """
import pathlib, pytest
def number():
    file = pathlib.Path("seen")
    seen = int(file.read_text()) if file.exists() else 0
    file.write_text(str(seen + 1))
    return seen
@pytest.mark.real_time
def test_late():
    if number() in {failing}: raise TimeoutError("nothing came")
"""


def run_here(directory: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> Run:
    inner_runs.write(directory, source)
    monkeypatch.chdir(directory)
    command = Command(
        arguments=("pytest", "-p", "no:cacheprovider", "test_here.py"),
        environment=inner_runs.environment(),
        repeat_options=("-p", "no:cacheprovider"),
    )
    return run_lanes({"inner": (command,)})


@pytest.mark.parametrize(("failing", "succeeds"), [({0}, True), ({0, 3}, False)])
def test_a_wait_has_to_pass_three_times_of_three(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    failing: set[int],
    succeeds: bool,
) -> None:
    run = run_here(tmp_path, monkeypatch, LATE.replace("{failing}", str(failing)))
    output = capsys.readouterr().out
    assert run.succeeded is succeeds
    assert (tmp_path / "seen").read_text() == "4"
    assert ("Passed only when repeated: test_here.py::test_late" in output) == succeeds
    assert ('test = "test_here.py::test_late"' in output) == succeeds


def test_a_wrong_result_is_never_repeated_and_is_named_with_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = LATE.replace("{failing}", "{0}") + '\n@pytest.mark.real_time\ndef test_wrong(): assert "B" == "A"\n'
    run = run_here(tmp_path, monkeypatch, wrong)
    assert not run.succeeded
    assert (tmp_path / "seen").read_text() == "1"
    lines = capsys.readouterr().out.splitlines()
    [line] = [line for line in lines if line.startswith("FAILED test_here.py::test_wrong: AssertionError")]
    assert "CPU pressure" in line
    kept = [json.loads(each) for each in (tmp_path / "build/failures-inner.jsonl").read_text().splitlines()]
    assert [entry["test"].partition("::")[2] for entry in kept] == ["test_late", "test_wrong"]
    assert all(entry["processor"] and entry["seconds"] >= 0 for entry in kept)
    assert (tmp_path / "build/junit-inner-0.xml").exists()


def test_a_command_that_fails_without_a_test_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run = run_lanes({"inner": (Command(arguments=("python", "-c", "raise SystemExit(3)")),)})
    assert not run.succeeded
    assert "FAILED inner: python -c" in capsys.readouterr().out
