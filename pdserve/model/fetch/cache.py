"""A cache of directories: an entry is complete or absent after any crash, and concurrent processes make it once."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pdserve.base.config import variable
from pdserve.base.errors import SetupError
from pdserve.model.fetch.progress import ProgressCallback


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/pdserve`, or `~/.cache/pdserve`."""
    base = variable("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "pdserve"


def cached_directory(models_dir: Path, key: str, fill: Callable[[Path], None], progress: ProgressCallback) -> Path:
    """`models_dir / key`, filled at first use by `fill(directory)`. Other processes wait for the one that fills it.

    An error of `fill` is passed on and leaves nothing behind; an `OSError` becomes a `SetupError`.
    """
    entry = models_dir / key
    if entry.is_dir():
        return entry
    try:
        models_dir.mkdir(parents=True, exist_ok=True)
        with locked(
            models_dir / f".{key}.lock", lambda: progress(f"Waiting for another process to make {key}", 0, None)
        ):
            if not entry.is_dir():
                _make(entry, fill)
    except OSError as error:
        reason = error.strerror or str(error)
        raise SetupError(
            f"Cannot write the model cache {models_dir}: {reason}. Free some space, or use another cache directory."
        ) from error
    return entry


def _make(entry: Path, fill: Callable[[Path], None]) -> None:
    prefix = f".{entry.name}.partial-"
    # Only the holder of the lock makes such directories, so existing ones were left by a process that was killed.
    for stale in entry.parent.glob(f"{prefix}*"):
        shutil.rmtree(stale)
    partial = Path(tempfile.mkdtemp(prefix=prefix, dir=entry.parent))
    try:
        fill(partial)
        for path in (*partial.iterdir(), partial):
            sync(path)
        partial.chmod(0o755)
        partial.rename(entry)
        sync(entry.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def sync(path: Path) -> None:
    """Writes a file or directory to the disk, so that it survives a power failure once a rename publishes it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def locked(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Holds an exclusive lock on the file, which the kernel releases when the process ends in any way."""
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
