"""Plugin of pytest: writes the outcome of each test as a line of JSON, and of a failure whether it was a wait.

`--outcomes FILE` selects the file. The runs of `make test` and `make test-deploy` read it to report failures with what
the machine did meanwhile, to decide what may be repeated, and to know how long each test takes.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Generator, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TextIO

import grpc
import pytest

#: Folders whose tests wait for real processes, unless they run on a clock of their own.
REAL_TIME_FOLDERS = ("tests/chaos", "tests/deploy", "tests/integration", "tests/unit/cli")
_OWN_CLOCKS = ("virtual_time", "advanced_time")
#: How an assertion or a failure begins that says that something was waited for in vain.
_WAITED = ("did not happen within", "Timeout (>")
_MAX_ERROR = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How one test ended, or one phase of it that failed."""

    test: str
    outcome: Literal["passed", "failed", "skipped"]
    #: Wall-clock time of the phase in Unix seconds.
    started_at: float
    ended_at: float
    #: First line of the error, or the reason of a skip.
    message: str = ""
    #: The failure was a deadline of a wait, and nothing else.
    is_wait: bool = False
    #: The test waits for other processes on the real clock.
    is_real_time: bool = False

    @property
    def seconds(self) -> float:
        """Duration of the phase."""
        return self.ended_at - self.started_at


def is_wait(error: BaseException) -> bool:
    """Whether an error says that something did not happen in time, with all errors of a group."""
    if isinstance(error, BaseExceptionGroup):
        return all(is_wait(each) for each in error.exceptions)
    if isinstance(error, TimeoutError | subprocess.TimeoutExpired):
        return True
    if isinstance(error, grpc.RpcError):
        return isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    return isinstance(error, AssertionError | pytest.fail.Exception) and str(error).startswith(_WAITED)


def is_real_time(item: pytest.Item) -> bool:
    """Whether a test is marked `real_time`, or lies where tests wait for real processes and has no clock of its own."""
    if item.get_closest_marker("real_time"):
        return True
    in_folder = item.nodeid.startswith(tuple(f"{folder}/" for folder in REAL_TIME_FOLDERS))
    return in_folder and not any(item.get_closest_marker(name) for name in _OWN_CLOCKS)


class OutcomeFile:
    """Writes outcomes as they come in. With pytest-xdist, one process writes those of all."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: TextIO = path.open("w", encoding="utf-8")

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.passed and report.when != "call":
            return
        message = ""
        if report.skipped:
            message = report.longrepr[2].removeprefix("Skipped: ") if isinstance(report.longrepr, tuple) else ""
        elif report.failed:
            message = _first_line(report.longrepr)
        self._write(
            Outcome(
                test=report.nodeid,
                outcome=report.outcome,
                started_at=report.start,
                ended_at=report.stop,
                message=message,
                is_wait=getattr(report, "is_wait", False),
                is_real_time=getattr(report, "is_real_time", False),
            )
        )

    @pytest.hookimpl
    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            message = _first_line(report.longrepr)
            self._write(Outcome(test=report.nodeid, outcome="failed", started_at=0.0, ended_at=0.0, message=message))

    @pytest.hookimpl
    def pytest_unconfigure(self) -> None:
        self._file.close()

    def _write(self, outcome: Outcome) -> None:
        self._file.write(json.dumps(asdict(outcome)) + "\n")
        self._file.flush()


class FailureKinds:
    """Adds to the report of a failure what only the process that ran the test knows: its error."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[Any]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.failed and call.excinfo is not None:
            # pytest-xdist passes attributes of reports on.
            report.__dict__.update(is_wait=is_wait(call.excinfo.value), is_real_time=is_real_time(item))
        return report


def add_option(parser: pytest.Parser) -> None:
    """`--outcomes FILE` of pytest."""
    parser.addoption("--outcomes", type=Path, metavar="FILE", help="where to write each test's outcome, as JSON lines")


def register(config: pytest.Config) -> None:
    """Registers the plugin in the processes that run tests, and in the one that reports."""
    config.pluginmanager.register(FailureKinds())
    path = config.getoption("outcomes")
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(OutcomeFile(path))


def read(path: Path) -> Iterator[Outcome]:
    """The outcomes in a file; none if no run has written it."""
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            yield Outcome(**json.loads(line))


def _first_line(longrepr: object) -> str:
    crash = getattr(longrepr, "reprcrash", None)
    text = crash.message if crash is not None else str(longrepr)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0][:_MAX_ERROR] if lines else ""
