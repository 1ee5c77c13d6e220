"""Directories of one run of `pdserve up`: a private one that its processes share, and one for its logs.

Each is locked as long as its run lives. Directories of runs that ended, or were killed, are removed by later runs.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from pdserve.base.config import variable
from pdserve.base.errors import SetupError

_SHARED_MEMORY = Path("/dev/shm")
_PRIVATE_PREFIX = "pdserve-run-"
#: Mode of directories that are for this user alone.
_PRIVATE = 0o700
#: Younger directories may belong to a run that has not marked them yet.
_FRESH_S = 10.0
#: Names of log directories that `pdserve up` chooses. Others are never removed.
_LOG_NAME = re.compile(r"\d{8}-\d{6}(-\d+)?")


@contextmanager
def private_directory() -> Iterator[Path]:
    """A new directory that only this user can open, in memory where possible; removed when the block ends."""
    # If this process is killed first, a later run removes it, or the system: a session's runtime directory when the
    # session ends, shared memory at the next boot.
    try:
        directory = Path(tempfile.mkdtemp(prefix=_PRIVATE_PREFIX, dir=_runtime()))
    except OSError:  # It does not exist, or this user may not write there.
        directory = Path(tempfile.mkdtemp(prefix=_PRIVATE_PREFIX))
    try:
        with _living(directory):
            _remove_ended(path for path in directory.parent.glob(f"{_PRIVATE_PREFIX}*") if path != directory)
            yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def private_directories() -> list[Path]:
    """Those of this user's runs, the newest first; there may be some of runs that were killed."""
    found = (path for root in (_runtime(), Path(tempfile.gettempdir())) for path in root.glob(f"{_PRIVATE_PREFIX}*"))
    ages: dict[Path, float] = {}
    for path in found:
        with suppress(OSError):
            status = path.stat()
            if status.st_uid == os.getuid():
                ages[path] = status.st_mtime
    return sorted(ages, key=lambda path: ages[path], reverse=True)


def _runtime() -> Path:
    return Path(variable("XDG_RUNTIME_DIR") or _SHARED_MEMORY)


@contextmanager
def log_directory(chosen: str | None, *, max_runs: int) -> Iterator[Path]:
    """The chosen directory for this run's logs, else a new one named after the time. Raises `SetupError`.

    Of the directories named after times, the newest `max_runs` stay, this one included, and those of live runs.
    """
    if chosen is not None:
        path = Path(chosen).expanduser().absolute()
        _make(path)
        yield path
        return
    state = variable("XDG_STATE_HOME")
    root = (Path(state) if state else Path.home() / ".local" / "state") / "pdserve" / "logs"
    _make(root)
    path = _new_directory(root)
    with _living(path):
        old = sorted(entry for entry in root.iterdir() if entry != path and _LOG_NAME.fullmatch(entry.name))
        _remove_ended(old[: max(0, len(old) - (max_runs - 1))])
        yield path


def _new_directory(root: Path) -> Path:
    """Runs that start in the same second get different ones."""
    name = datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
    for number in range(1, 1000):
        path = root / (name if number == 1 else f"{name}-{number}")
        with suppress(FileExistsError):
            _make(path, exist_ok=False, mode=_PRIVATE)
            return path
    raise SetupError(f"{root} has a thousand log directories of this second. Choose one with --log-dir.")


def _make(path: Path, *, exist_ok: bool = True, mode: int = 0o777) -> None:
    try:
        path.mkdir(mode=mode, parents=True, exist_ok=exist_ok)
    except FileExistsError:
        if exist_ok:  # It is a file.
            raise SetupError(
                f"Cannot make the log directory {path}: it is a file. Choose one with --log-dir."
            ) from None
        raise
    except OSError as error:
        raise SetupError(
            f"Cannot make the log directory {path}: {error.strerror}. Choose one with --log-dir."
        ) from error


@contextmanager
def _living(directory: Path) -> Iterator[None]:
    """Marks the directory as that of a live run. The mark vanishes with the process."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # Some network file systems have no locks. There, nothing can be removed either.
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _remove_ended(directories: Iterable[Path]) -> None:
    """Removes directories that no live run has marked. What cannot be removed stays."""
    for directory in directories:
        with suppress(OSError):
            if time.time() - directory.stat().st_mtime < _FRESH_S:
                continue
            descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(directory, ignore_errors=True)
            finally:
                os.close(descriptor)
