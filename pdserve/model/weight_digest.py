"""SHA-256 of a weight file, over every byte, computed once and kept: beside the file, or else in the user's cache."""

from __future__ import annotations

import hashlib
from pathlib import Path

from pdserve.model.kept_file import in_cache, keep, read_kept

#: End of the name of a hidden file that keeps a digest.
KEPT_SUFFIX = ".digest.json"
_READ_BYTES = 1 << 22


def weight_digest(path: Path) -> str:
    """64 hex digits. A kept digest counts while size, modification time and inode are those of the file.

    Raises `OSError` when the file cannot be read. A digest that cannot be kept is computed again next time.
    """
    identity = _identity(path)
    cached = in_cache("digests", f"{_name_of(path)}{KEPT_SUFFIX}")
    kept_in = [each for each in (path.with_name(f".{path.name}{KEPT_SUFFIX}"), cached) if each is not None]
    for kept in kept_in:
        digest = _kept(kept, identity)
        if digest is not None:
            return digest
    digest = _computed(path)
    if _identity(path) == identity:
        any(keep(kept, {**identity, "sha256": digest}) for kept in kept_in)
    return digest


def is_kept_digest(name: str) -> bool:
    """Whether a file of a model's directory is such a digest, and no file of the model."""
    return name.startswith(".") and name.endswith(KEPT_SUFFIX)


def _identity(path: Path) -> dict[str, object]:
    status = path.stat()
    return {"size": status.st_size, "mtime_ns": status.st_mtime_ns, "inode": status.st_ino}


def _name_of(path: Path) -> str:
    return hashlib.blake2b(str(path.resolve()).encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()


def _kept(path: Path, identity: dict[str, object]) -> str | None:
    fields = read_kept(path)
    if fields is None:
        return None
    digest = fields.raw("sha256")
    is_of_file = {name: fields.raw(name) for name in identity} == identity
    return digest if is_of_file and isinstance(digest, str) and len(digest) == 64 else None


def _computed(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_READ_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
