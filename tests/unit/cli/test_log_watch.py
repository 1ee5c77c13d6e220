"""Warnings and errors from log files reach the console."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from pdserve.base import logs
from pdserve.cli.log_watch import LineBudget, LogTail, warning_text, watched_logs
from tests.support.deadline import DEADLINE_S

TIME = "2026-01-02T03:04:05.678Z"


@pytest.mark.parametrize("log_format", logs.FORMATS)
def test_a_warning_of_our_own_logger_is_recognized(capsys: pytest.CaptureFixture[str], log_format: str) -> None:
    root = logging.getLogger()
    before = (root.handlers[:], root.level)
    try:
        logs.configure("router_svc", log_format=log_format)
        logs.get_logger("one").warning("redis_lost", since=3)
    finally:
        root.handlers[:], level = before
        root.setLevel(level)
        logging.captureWarnings(False)
    assert warning_text(capsys.readouterr().err.strip()) == "warning: router_svc one redis_lost since=3"


@pytest.mark.parametrize(
    "line",
    [
        f"{TIME} INFO    a b",
        "WARNING: from a library",
        "Traceback (most recent call last):",
        "",
        "{",
        '{"level": "info"}',
    ],
)
def test_other_lines_are_not_shown(line: str) -> None:
    assert warning_text(line) is None


def test_a_line_is_returned_once_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    tail = LogTail(path)
    assert tail.new_lines() == []
    path.write_text("one\ntw")
    assert tail.new_lines() == ["one"]
    path.write_text("one\ntwo\nthree\n")
    assert tail.new_lines() == ["two", "three"]
    assert tail.new_lines() == []


def test_a_truncated_file_is_read_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("long line\n")
    tail = LogTail(path)
    tail.new_lines()
    path.write_text("new\n")
    assert tail.new_lines() == ["new"]


async def test_warnings_of_old_and_new_files_arrive(tmp_path: Path) -> None:
    old, new = tmp_path / "old.log", tmp_path / "new.log"
    old.write_text(f"{TIME} ERROR   was there before\n")
    seen: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
    with watched_logs(tmp_path, lambda name, text: seen.put_nowait((name, text))) as watching:
        assert watching
        with old.open("a") as log:
            log.write(f"{TIME} INFO    fine\n{TIME} WARNING hot\n")
        new.write_text(f"{TIME} ERROR   broken\n")
        async with asyncio.timeout(DEADLINE_S):
            assert {await seen.get(), await seen.get()} == {("old", "warning: hot"), ("new", "error: broken")}
    assert seen.empty()


def test_a_flood_of_lines_is_cut_until_the_window_is_over() -> None:
    budget = LineBudget(lines=2, window_s=10)
    assert [budget.left("a", now) for now in (0, 1, 2, 9)] == [2, 1, 0, 0]
    assert budget.left("b", 9) == 2
    assert budget.left("a", 10) == 2
