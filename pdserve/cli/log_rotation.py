"""Keeps the log files of a run from growing without bounds: full ones are copied to numbered files and emptied.

A process writes its output straight to its file, also what libraries and dying interpreters print, so the file has to
stay the same. Lines that are written in the instant between copying and emptying are lost.
"""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import dataclass
from pathlib import Path

from pdserve.base.logs import get_logger

log = get_logger(__name__)

#: Interval of looking at the sizes.
_INTERVAL_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLimits:
    """Size and number of the files of one process."""

    #: A file is rotated when it is larger.
    max_bytes: int
    #: Files of one process, the one that is written to included.
    max_files: int


async def rotating(directory: Path, limits: LogLimits) -> None:
    """Rotates the `*.log` files of a directory until it is cancelled."""
    while True:
        await asyncio.sleep(_INTERVAL_S)
        await asyncio.to_thread(rotate_all, directory, limits)


def rotate_all(directory: Path, limits: LogLimits) -> None:
    """Rotates the files that are too large. A file that cannot be rotated stays as it is."""
    for path in directory.glob("*.log"):
        try:
            if path.stat().st_size > limits.max_bytes:
                rotate(path, limits.max_files)
        except OSError as error:
            log.warning("log_not_rotated", path=str(path), error=str(error))


def rotate(path: Path, max_files: int) -> None:
    """Moves `name.log.1` to `.2` and so on, copies `name.log` to `name.log.1` and empties it. Raises OSError."""
    for number in range(max_files - 1, 1, -1):
        older = _numbered(path, number - 1)
        if older.exists():
            older.replace(_numbered(path, number))
    if max_files > 1:
        shutil.copyfile(path, _numbered(path, 1))
    # Writers append, so they go on at the new end.
    with path.open("r+b") as file:
        file.truncate()


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")
