"""Writes secrets into a directory that services read, such as a volume. What is there stays as it is."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from pdserve.base.errors import SetupError
from pdserve.cli.cluster_secrets.contents import READERS, SecretGroup

#: Read by the owner and its group, which is 0 for containers of any user.
_FILE_MODE, _DIRECTORY_MODE = 0o640, 0o750


def write_missing(
    directory: Path, groups: Sequence[SecretGroup], show: Callable[[str], None], *, by_reader: bool = False
) -> list[str]:
    """Writes the groups that are not complete there; returns the names of their files.

    With `by_reader`, each file is in a directory of its reader, so that a service can be given that directory alone.
    A file is complete or absent. The last one of a group is renamed last, after `show` was called with the group's API
    key: whatever interrupts this, a key that works has been shown.

    Raises:
        SetupError: the directory cannot be written.
    """
    readers = {name: READERS[name] if by_reader else "." for group in groups for name in group.files}
    paths = {name: directory / reader / name for name, reader in readers.items()}
    directories = sorted({path.parent for path in paths.values()})
    try:
        for each in directories:
            each.mkdir(mode=_DIRECTORY_MODE, parents=True, exist_ok=True)
        # The directory above those of the readers may be read-only, as in a container in which each is a volume.
        with _locked(directories[0]):
            return [name for group in groups if _write(group, paths, show) for name in group.files]
    except OSError as error:
        raise SetupError(
            f"Cannot write secrets to {directory}: {error.strerror}. Name a directory that this user may write."
        ) from error


def _write(group: SecretGroup, paths: Mapping[str, Path], show: Callable[[str], None]) -> bool:
    *_, last = group.files
    if paths[last].exists():
        return False
    for name, content in group.files.items():
        _store(_unfinished(paths[name]), content)
    if group.api_key is not None:
        show(group.api_key)
    for name in group.files:
        _unfinished(paths[name]).rename(paths[name])
    for directory in {paths[name].parent for name in group.files}:
        _sync(directory)
    return True


def _unfinished(path: Path) -> Path:
    return path.with_name(f".{path.name}.new")


def _store(path: Path, content: bytes) -> None:
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _FILE_MODE)
    with os.fdopen(descriptor, "wb") as file:
        # Not only what the umask leaves of it.
        os.fchmod(descriptor, _FILE_MODE)
        file.write(content)
        file.flush()
        os.fsync(descriptor)


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """One writer at a time, also of several containers."""
    descriptor = os.open(directory / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _FILE_MODE)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
