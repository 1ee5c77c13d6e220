"""Follows the log files of a directory and picks out warnings and errors.

The files are followed, instead of reading the processes' output through pipes, so that no process ever waits for us: a
terminal that is paused with Ctrl-S, or `pdserve up` suspended with Ctrl-Z, must not stop the cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

_IN_MODIFY = 0x2
_EVENT = struct.Struct("iIII")  # watch, mask, cookie, length of the name that follows
_READ_BYTES = 64 * 1024
#: What a line of `pdserve.base.logs` looks like: time, level, the rest.
_SERIOUS = re.compile(r"\d{4}-\d\d-\d\dT\S+ (WARNING|ERROR|CRITICAL)\s+(.*)")


def serious_part(line: str) -> str | None:
    """A log line without its time when it is a warning or worse, else None."""
    match = _SERIOUS.match(line)
    return f"{match[1].lower()}: {match[2]}" if match else None


class Follower:
    """Hands out the whole lines that were added to a file since the last time, from byte `offset` on."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self._path = path
        self._rest = b""
        self._offset = offset

    def new_lines(self) -> list[str]:
        """Lines that are complete by now; none when the file is gone."""
        try:
            with self._path.open("rb") as log:
                if log.seek(0, os.SEEK_END) < self._offset:  # someone emptied it
                    self._offset, self._rest = 0, b""
                log.seek(self._offset)
                data = log.read()
        except OSError:
            return []
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line.decode("utf-8", errors="replace") for line in lines]


class LineBudget:
    """At most `lines` lines of each name within `window_s`: a storm of warnings must not bury the console."""

    def __init__(self, *, lines: int = 5, window_s: float = 10.0) -> None:
        self._lines = lines
        self._window_s = window_s
        self._windows: dict[str, tuple[float, int]] = {}

    def left(self, name: str, now: float) -> int:
        """Takes one line from the budget; how many it had left, so 1 means that this one is the last for a while."""
        began, used = self._windows.get(name, (now, 0))
        if now - began >= self._window_s:
            began, used = now, 0
        self._windows[name] = (began, used + 1)
        return max(0, self._lines - used)


@contextlib.contextmanager
def watched_logs(directory: Path, on_serious: Callable[[str, str], None]) -> Iterator[bool]:
    """While the block runs, `on_serious(name, text)` gets each warning or error added to a `name.log`.

    Yields False when the system does not let us watch (too many watches); then nothing is followed.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if descriptor < 0:
        yield False
        return
    followers = {path.name: Follower(path, path.stat().st_size) for path in directory.glob("*.log")}

    def on_change() -> None:
        for name in _changed_names(descriptor):
            if name.endswith(".log"):
                if name not in followers:
                    followers[name] = Follower(directory / name)
                for line in followers[name].new_lines():
                    if (text := serious_part(line)) is not None:
                        on_serious(name.removesuffix(".log"), text)

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
    """The files that the pending events are about."""
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
