"""Directories of runs: new ones, kept ones, and those of live runs, which are real processes."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pdserve.base.errors import SetupError
from pdserve.cli import run_dir
from pdserve.cli.run_dir import log_directory, private_directory

#: A run that prints its two directories and lives until it is killed.
_RUN = """
import sys
from pdserve.cli.run_dir import log_directory, private_directory
with log_directory(None, max_runs=1) as logs, private_directory() as private:
    print(logs, private, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of all log directories."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    (tmp_path / "runtime").mkdir()
    monkeypatch.setattr(run_dir, "_FRESH_S", -1.0)
    return tmp_path / "state" / "pdserve" / "logs"


@contextmanager
def live_run() -> Iterator[tuple[subprocess.Popen[str], Path, Path]]:
    process = subprocess.Popen(
        [sys.executable, "-c", _RUN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ
    )
    with process:
        try:
            assert process.stdout is not None
            log_dir, private = process.stdout.readline().split()
            yield process, Path(log_dir), Path(private)
        finally:
            process.kill()


def finished(root: Path, *names: str) -> None:
    for name in names:
        (root / name).mkdir(parents=True)
        (root / name / "router.log").write_text("text")


def test_the_directories_of_a_run_are_for_its_user_alone(logs: Path) -> None:
    """Who else is on the host sees neither addresses of clients nor the sockets. Fails with the mode of the umask."""
    with log_directory(None, max_runs=1) as log_dir, private_directory() as private:
        assert {stat.S_IMODE(path.stat().st_mode) for path in (log_dir, private)} == {0o700}


def test_the_newest_runs_are_kept_and_nothing_else_is_touched(logs: Path) -> None:
    finished(logs, "20260101-000000", "20260102-000000", "20260102-000000-2", "20260103-000000", "mine")
    (logs / "20260101-000001").write_text("a file")
    with log_directory(None, max_runs=3) as path:
        kept = sorted(entry.name for entry in logs.iterdir())
    assert kept == ["20260101-000001", "20260102-000000-2", "20260103-000000", path.name, "mine"]


def test_directories_of_live_runs_stay_and_those_of_killed_ones_go(logs: Path) -> None:
    with live_run() as (process, log_dir, private):
        with log_directory(None, max_runs=1), private_directory():
            assert log_dir.is_dir()
            assert private.is_dir()
        process.kill()
        process.wait()
        assert log_dir.is_dir()
        assert private.is_dir()
        with log_directory(None, max_runs=1) as mine, private_directory() as other:
            assert [entry for entry in logs.iterdir() if entry == log_dir] == []
            assert not private.exists()
            assert mine.is_dir()
            assert other.is_dir()
        assert mine.is_dir()
        assert not other.exists()


def test_runs_of_the_same_second_have_different_directories(logs: Path) -> None:
    with log_directory(None, max_runs=9) as one, log_directory(None, max_runs=9) as two:
        assert one != two
        assert sorted(logs.iterdir()) == sorted((one, two))


def test_a_chosen_directory_is_used_as_it_is(tmp_path: Path) -> None:
    finished(tmp_path, "20260101-000000")
    with log_directory(str(tmp_path), max_runs=1) as path:
        assert path == tmp_path
    assert (tmp_path / "20260101-000000").is_dir()


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SetupError, match="--log-dir"), log_directory(str(tmp_path / "file"), max_runs=1):
        pass
    with pytest.raises(SetupError, match="Not a directory"), log_directory(str(tmp_path / "file" / "x"), max_runs=1):
        pass


def test_a_directory_that_a_starting_run_has_not_marked_yet_stays(logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_dir, "_FRESH_S", 60.0)
    finished(logs, "20260101-000000")
    with log_directory(None, max_runs=1):
        assert (logs / "20260101-000000").is_dir()
