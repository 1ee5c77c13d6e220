"""Follows the log files of a directory and picks out warnings and errors.

Processes write to files, not to pipes, so that no process ever waits for its reader. A terminal paused with Ctrl-S, or
`pdserve up` suspended with Ctrl-Z, must not stop the cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

from pdserve.base.logs import quote

_IN_MODIFY = 0x2
_EVENT = struct.Struct("iIII")  # Watch, mask, cookie, length of the name that follows.
_READ_BYTES = 64 * 1024
#: A line of `pdserve.base.logs` with a level of warning or worse: time, level, the rest.
_WARNING = re.compile(r"\d{4}-\d\d-\d\dT\S+ (WARNING|ERROR|CRITICAL)\s+(.*)")

_WARNING_LEVELS = ("warning", "error", "critical")
#: Keys of a JSON line that its text starts with or does not show.
_NOT_SHOWN = {"time", "level", "process", "logger", "event", "exception", "trace_id", "span_id"}


def warning_text(line: str) -> str | None:
    """A log line, text or JSON, without its time if it is a warning or worse, else None."""
    if line.startswith("{"):
        return _json_warning(line)
    match = _WARNING.match(line)
    return f"{match[1].lower()}: {match[2]}" if match else None


def _json_warning(line: str) -> str | None:
    try:
        fields = json.loads(line)
    except ValueError:
        return None
    if not isinstance(fields, dict) or fields.get("level") not in _WARNING_LEVELS:
        return None
    head = [str(fields.get(name, "")) for name in ("process", "logger", "event")]
    rest = [f"{name}={quote(value)}" for name, value in fields.items() if name not in _NOT_SHOWN]
    return f"{fields['level']}: {' '.join([*head, *rest])}"


class LogTail:
    """Reads the complete lines that are added to a file, from byte `offset` on."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self._path = path
        self._rest = b""
        self._offset = offset

    def new_lines(self) -> list[str]:
        """Lines completed since the last call; none if the file is gone."""
        try:
            with self._path.open("rb") as log:
                if log.seek(0, os.SEEK_END) < self._offset:  # The file was truncated.
                    self._offset, self._rest = 0, b""
                log.seek(self._offset)
                data = log.read()
        except OSError:
            return []
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line.decode("utf-8", errors="replace") for line in lines]


class LineBudget:
    """Allows `lines` lines per name within `window_s`, so that a flood of warnings cannot bury the console."""

    def __init__(self, *, lines: int = 5, window_s: float = 10.0) -> None:
        self._lines = lines
        self._window_s = window_s
        self._windows: dict[str, tuple[float, int]] = {}

    def left(self, name: str, now: float) -> int:
        """Takes one line from the budget; returns the number it had left, so 1 means the last line of this window."""
        window_start, used = self._windows.get(name, (now, 0))
        if now - window_start >= self._window_s:
            window_start, used = now, 0
        self._windows[name] = (window_start, used + 1)
        return max(0, self._lines - used)


@contextlib.contextmanager
def watched_logs(directory: Path, on_warning: Callable[[str, str], None]) -> Iterator[bool]:
    """Calls `on_warning(name, text)` for each warning or error added to a `name.log` while the block runs.

    Yields False when the system allows no more watches; then no file is followed.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if descriptor < 0:
        yield False
        return
    tails = {path.name: LogTail(path, path.stat().st_size) for path in directory.glob("*.log")}

    def on_change() -> None:
        for name in _changed_names(descriptor):
            if name.endswith(".log"):
                if name not in tails:
                    tails[name] = LogTail(directory / name)
                for line in tails[name].new_lines():
                    if (text := warning_text(line)) is not None:
                        on_warning(name.removesuffix(".log"), text)

    loop = asyncio.get_running_loop()
    try:
        watching = libc.inotify_add_watch(descriptor, os.fsencode(directory), _IN_MODIFY) >= 0
        if watching:
            loop.add_reader(descriptor, on_change)
        yield watching
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def _changed_names(descriptor: int) -> set[str]:
    """Names of the files with pending events."""
    names = set()
    with contextlib.suppress(BlockingIOError):
        data = os.read(descriptor, _READ_BYTES)
        offset = 0
        while offset < len(data):
            *_, length = _EVENT.unpack_from(data, offset)
            offset += _EVENT.size
            names.add(os.fsdecode(data[offset : offset + length].rstrip(b"\0")))
            offset += length
    return names
