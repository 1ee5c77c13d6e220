"""The list of a fetched model's files with their sizes and SHA-256 digests, which stands beside them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from pdserve.base.errors import SetupError
from pdserve.model.fetch.progress import ProgressCallback
from pdserve.model.weight_digest import is_kept_digest

MANIFEST = "pdserve-manifest.json"
#: Where transformers saves chat templates besides the default one.
_TEMPLATES = "additional_chat_templates"
_READ_BYTES = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """One file of a model."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a directory holds."""

    #: The name that was fetched: an alias, a hub id or a path.
    model: str
    #: Commit of the hub's repository; None for other models.
    revision: str | None = None
    #: By the file's name.
    files: dict[str, FileEntry]


def sha256_of(path: Path) -> str:
    """The file's SHA-256 in hex digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_READ_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def model_files(directory: Path) -> list[Path]:
    """The files of a model in a directory, without those that stand beside them."""
    found = (*directory.iterdir(), *(directory / _TEMPLATES).glob("*.jinja"))
    return sorted(path for path in found if path.is_file() and path.name != MANIFEST and not is_kept_digest(path.name))


def write_manifest(directory: Path, model: str, progress: ProgressCallback, *, revision: str | None = None) -> None:
    """Reads every file of the directory and writes their list into it."""
    paths = model_files(directory)
    total = sum(path.stat().st_size for path in paths)
    entries, done = {}, 0
    for path in paths:
        progress("Computing digests", done, total)
        size = path.stat().st_size
        entries[path.relative_to(directory).as_posix()] = {"size_bytes": size, "sha256": sha256_of(path)}
        done += size
    progress("Computing digests", total, total)
    content = {"model": model, "revision": revision, "files": entries}
    (directory / MANIFEST).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_manifest(directory: Path) -> Manifest | None:
    """The list that stands in the directory; None without one. Raises `SetupError` when it cannot be read."""
    path = directory / MANIFEST
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        files = {name: FileEntry(**entry) for name, entry in content["files"].items()}
        return Manifest(model=content["model"], revision=content.get("revision"), files=files)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise SetupError(f"{path} cannot be read: {error}. Remove {directory} and fetch the model again.") from error


def damaged_files(directory: Path, manifest: Manifest, *, digests: bool) -> list[str]:
    """What differs from the list, one line for each file; `digests`: every byte is read, not the sizes alone."""
    found = []
    for name, entry in manifest.files.items():
        path = directory / name
        if not path.is_file():
            found.append(f"{name} is missing")
        elif path.stat().st_size != entry.size_bytes:
            found.append(f"{name} has {path.stat().st_size} bytes instead of {entry.size_bytes}")
        elif digests and sha256_of(path) != entry.sha256:
            found.append(f"{name} has another SHA-256 than {entry.sha256}")
    return found


def git_blob_id(path: Path) -> str:
    """Git's name of a file: a SHA-1 over its header and content."""
    content = path.read_bytes()
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content, usedforsecurity=False).hexdigest()
