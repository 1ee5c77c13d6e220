"""Cache entries are complete or absent: tested with real processes, real locks and a real limit on file sizes."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pdserve.base.errors import SetupError
from pdserve.model.fetch.cache import cached_directory, default_cache_dir
from pdserve.model.fetch.progress import silent

#: Fills an entry: prints "filling", waits for a line on stdin, writes a file, and prints the file of the entry.
_FILLER = """
import sys
from pathlib import Path
from pdserve.model.fetch.cache import cached_directory

def fill(directory):
    print("filling", flush=True)
    sys.stdin.readline()
    (directory / "made-by").write_text(sys.argv[2])

entry = cached_directory(Path(sys.argv[1]), "entry", fill, lambda what, done, total: print(what, flush=True))
print((entry / "made-by").read_text(), flush=True)
"""


def start_filler(directory: Path, name: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _FILLER, str(directory), name]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if not path.name.endswith(".lock"))


def test_an_entry_is_filled_once(tmp_path: Path) -> None:
    made: list[Path] = []

    def fill(directory: Path) -> None:
        made.append(directory)
        (directory / "x").write_text("1")

    for _ in range(2):
        entry = cached_directory(tmp_path / "models", "entry", fill, silent)
        assert (entry / "x").read_text() == "1"
    assert len(made) == 1
    assert names_in(tmp_path / "models") == ["entry"]


def test_concurrent_processes_fill_an_entry_once_and_the_second_reports_that_it_waits(tmp_path: Path) -> None:
    with start_filler(tmp_path, "first") as first:
        assert read_line(first) == "filling"
        with start_filler(tmp_path, "second") as second:
            assert read_line(second) == "Waiting for another process to make entry"
            first.communicate("go\n", timeout=20)
            out, _ = second.communicate(timeout=20)
            assert out.strip() == "first"
    assert names_in(tmp_path) == ["entry"]


def test_a_process_killed_while_it_fills_an_entry_does_not_block_the_next_one(tmp_path: Path) -> None:
    with start_filler(tmp_path, "killed") as killed:
        assert read_line(killed) == "filling"
        assert len(names_in(tmp_path)) == 1
        killed.send_signal(signal.SIGKILL)
        killed.communicate(timeout=20)
    assert "entry" not in names_in(tmp_path)
    with start_filler(tmp_path, "next") as following:
        assert read_line(following) == "filling"
        out, _ = following.communicate("go\n", timeout=20)
        assert out.strip() == "next"
    assert names_in(tmp_path) == ["entry"]


def test_a_fill_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    def fill(directory: Path) -> None:
        (directory / "half").write_text("x")
        raise SetupError("no")

    with pytest.raises(SetupError, match="no"):
        cached_directory(tmp_path, "entry", fill, silent)
    assert names_in(tmp_path) == []


def test_a_full_disk_is_an_error_of_one_line_and_leaves_nothing_behind(tmp_path: Path) -> None:
    def fill(directory: Path) -> None:
        (directory / "weights").write_bytes(bytes(1 << 20))

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    try:
        with pytest.raises(SetupError) as refused:
            cached_directory(tmp_path, "entry", fill, silent)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert str(refused.value).startswith(f"Cannot write the model cache {tmp_path}: File too large.")
    assert "\n" not in str(refused.value)
    assert names_in(tmp_path) == []


def test_a_cache_directory_that_cannot_be_made_is_an_error_of_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SetupError, match=r"Cannot write the model cache .*: Not a directory"):
        cached_directory(tmp_path / "file" / "models", "entry", lambda _: None, silent)


def test_the_default_directory_follows_the_xdg_convention(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "pdserve"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / ".cache" / "pdserve"
