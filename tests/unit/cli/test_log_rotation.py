"""Rotation of files to which processes go on writing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from pdserve.cli.log_rotation import LogLimits, rotate, rotate_all
from pdserve.cli.log_watch import LogTail
from pdserve.cli.supervisor.child import tail_lines


def contents(directory: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in directory.iterdir()}


def test_full_files_move_up_and_the_oldest_goes(tmp_path: Path) -> None:
    path = tmp_path / "router.log"
    for text in ("one", "two", "three", "four"):
        path.write_text(text)
        rotate(path, 3)
    assert contents(tmp_path) == {"router.log": "", "router.log.1": "four", "router.log.2": "three"}


def test_with_a_single_file_what_is_full_is_emptied(tmp_path: Path) -> None:
    path = tmp_path / "router.log"
    path.write_text("one")
    rotate(path, 1)
    assert contents(tmp_path) == {"router.log": ""}


def test_only_log_files_above_the_limit_are_rotated(tmp_path: Path) -> None:
    for name, size in (("a.log", 11), ("b.log", 10), ("a.log.1", 99), ("note.txt", 99)):
        (tmp_path / name).write_text("x" * size)
    rotate_all(tmp_path, LogLimits(max_bytes=10, max_files=3))
    sizes = {name: len(text) for name, text in contents(tmp_path).items()}
    assert sizes == {"a.log": 0, "a.log.1": 11, "a.log.2": 99, "b.log": 10, "note.txt": 99}


def test_a_file_that_cannot_be_rotated_does_not_stop_the_others(tmp_path: Path) -> None:
    for name in ("a.log", "b.log"):
        (tmp_path / name).write_text("x" * 11)
    (tmp_path / "a.log.1").mkdir()
    rotate_all(tmp_path, LogLimits(max_bytes=10, max_files=2))
    assert (tmp_path / "a.log").stat().st_size == 11
    assert (tmp_path / "b.log").stat().st_size == 0


def test_a_process_goes_on_at_the_start_of_the_emptied_file_and_readers_follow(tmp_path: Path) -> None:
    path = tmp_path / "decode-0.log"
    code = "import sys\nfor line in sys.stdin: print('line', line.strip(), flush=True)"
    tail = LogTail(path)
    with path.open("ab") as log:
        process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=log, text=True)
    assert process.stdin is not None
    with process:
        process.stdin.write("1\n2\n3\n")
        process.stdin.flush()
        seen: list[str] = []
        while len(seen) < 3:
            seen += tail.new_lines()
        rotate(path, 2)
        assert tail.new_lines() == []
        process.stdin.write("4\n")
        process.stdin.close()
        process.wait()
    assert seen == ["line 1", "line 2", "line 3"]
    assert path.read_text() == "line 4\n"
    assert tail.new_lines() == ["line 4"]
    # The child's log began behind the end of the emptied file.
    assert tail_lines(path, 1000) == ["line 4"]
