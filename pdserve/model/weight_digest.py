"""SHA-256 of a weight file, over every byte, computed once and kept: beside the file, or else in the user's cache."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from pdserve.base.errors import SetupError
from pdserve.model.fetch.cache import default_cache_dir
from pdserve.model.fields import Fields

#: End of the name of a hidden file that keeps a digest.
KEPT_SUFFIX = ".digest.json"
_READ_BYTES = 1 << 22


def weight_digest(path: Path) -> str:
    """64 hex digits. A kept digest counts while size, modification time and inode are those of the file.

    Raises `OSError` when the file cannot be read. A digest that cannot be kept is computed again next time.
    """
    identity = _identity(path)
    kept_in = (path.with_name(f".{path.name}{KEPT_SUFFIX}"), *_in_cache(path))
    for kept in kept_in:
        digest = _kept(kept, identity)
        if digest is not None:
            return digest
    digest = _computed(path)
    if _identity(path) == identity:
        any(_keep(kept, {**identity, "sha256": digest}) for kept in kept_in)
    return digest


def is_kept_digest(name: str) -> bool:
    """Whether a file of a model's directory is such a digest, and no file of the model."""
    return name.startswith(".") and name.endswith(KEPT_SUFFIX)


def _identity(path: Path) -> dict[str, object]:
    status = path.stat()
    return {"size": status.st_size, "mtime_ns": status.st_mtime_ns, "inode": status.st_ino}


def _in_cache(path: Path) -> list[Path]:
    """The file in the user's cache; none for a user without a home directory, as in some containers."""
    name = hashlib.blake2b(str(path.resolve()).encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
    try:
        return [default_cache_dir() / "digests" / f"{name}{KEPT_SUFFIX}"]
    except RuntimeError:
        return []


def _kept(path: Path, identity: dict[str, object]) -> str | None:
    try:
        fields = Fields.read(path, 4096)
    except SetupError:  # Absent or damaged; then the digest is computed.
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


def _keep(path: Path, content: dict[str, object]) -> bool:
    """Writes the file whole or not at all; False if that is not possible here."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(json.dumps(content) + "\n", encoding="utf-8")
        unfinished.replace(path)
    except OSError:
        return False
    return True
