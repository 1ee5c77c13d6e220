"""Compares a snapshot in the cache of the hub's client with the hub's digests, after which the client names files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pdserve.base.errors import SetupError
from pdserve.model.fetch.manifest import git_blob_id
from pdserve.model.weight_digest import weight_digest

_SHA256_DIGITS, _SHA1_DIGITS = 64, 40


def verify_snapshot(model: str, directory: Path) -> None:
    """Raises `SetupError` for a file with another digest than the hub's, and removes it from the cache.

    A snapshot has links to files whose names are digests: SHA-256 of large files, and git's of others. Where the cache
    cannot have links, its files have other names and are not compared. Digests are kept, so this costs nothing when
    the snapshot is loaded or used again.
    """
    damaged = sorted(_damaged(directory))
    for path in damaged:
        path.resolve().unlink()
        path.unlink()
    if damaged:
        names = ", ".join(str(path.relative_to(directory)) for path in damaged)
        raise SetupError(f"{names} of {model} has another digest than the hub's. Run it again: it is downloaded anew.")


def _damaged(directory: Path) -> Iterator[Path]:
    for path in directory.rglob("*"):
        if not (path.is_symlink() and path.is_file()):
            continue
        named, digits = path.resolve().name, len(path.resolve().name)
        if digits == _SHA256_DIGITS:
            actual = weight_digest(path)
        else:
            actual = git_blob_id(path) if digits == _SHA1_DIGITS else named
        if actual != named:
            yield path
