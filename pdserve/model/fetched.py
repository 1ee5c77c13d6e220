"""A model into a directory that one names, such as a volume of workers: complete or absent, resumed after a crash."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

from pdserve.base.errors import SetupError
from pdserve.model.fetch.cache import locked, sync
from pdserve.model.fetch.gguf_convert import convert_gguf
from pdserve.model.fetch.hub import fill_from_hub
from pdserve.model.fetch.hub_name import hub_name
from pdserve.model.fetch.manifest import damaged_files, model_files, read_manifest, sha256_of, write_manifest
from pdserve.model.fetch.progress import ProgressCallback
from pdserve.model.resolve import (
    ALIASES,
    ResolvedModel,
    checked_model,
    fill_from_alias,
    unknown_model,
)
from pdserve.model.revision import revision_of

#: Returns the commit of what a hub has sent.
Fill = Callable[[Path, ProgressCallback], str | None]


def fetch_model(model: str, target: Path, progress: ProgressCallback, *, verify: bool = False) -> ResolvedModel:
    """Makes `target` a directory with the model, unless it is one. Raises `SetupError`, and then leaves it absent.

    Files are gathered in a hidden directory beside `target`, which an interrupted run leaves for the next one, and
    appear under their name together. A directory that is there is compared with its list of files: sizes, or every
    byte with `verify`.
    """
    target = target.absolute()
    if target.exists():
        return _existing(model, target, verify=verify)
    fill = _source(model)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        waiting = f"Waiting for another process to fetch {target.name}"
        with locked(target.parent / f".{target.name}.lock", lambda: progress(waiting, 0, None)):
            if not target.exists():
                _fill(model, target, fill, progress)
    except OSError as error:
        reason = error.strerror or str(error)
        raise SetupError(
            f"Cannot write {error.filename or target}: {reason}. Free some space, make the directory writable for this "
            "user, or use another directory."
        ) from error
    return checked_model(target, target.name)


def _existing(model: str, target: Path, *, verify: bool) -> ResolvedModel:
    manifest = read_manifest(target)
    if manifest is None:
        raise SetupError(f"{target} exists, but pdserve fetch did not make it. Name a directory that is not there yet.")
    if manifest.model != model:
        raise SetupError(f"{target} holds {manifest.model}, not {model}. Remove it, or name another directory.")
    damaged = damaged_files(target, manifest, digests=verify)
    if damaged:
        raise SetupError(f"{target} is damaged: {'; '.join(damaged)}. Remove it and fetch the model again.")
    return checked_model(target, target.name)


def _source(model: str) -> Fill:
    """What fills a directory with this model, possibly in several tries. Raises `SetupError` for an unknown name."""
    path = Path(model).expanduser()
    if model in ALIASES:
        return lambda directory, progress: fill_from_alias(model, directory, progress)
    if path.is_dir():
        return lambda directory, progress: _copy(path, directory, progress)
    if path.is_file() and path.suffix == ".gguf":
        return lambda directory, progress: convert_gguf(path, directory, progress)
    if (hub := hub_name(model)) is not None:
        return lambda directory, progress: fill_from_hub(hub, directory, progress)
    raise unknown_model(model)


def _fill(model: str, target: Path, fill: Fill, progress: ProgressCallback) -> None:
    # Only the holder of the lock comes here.
    prefix = f".{target.name}.partial-"
    partial = target.parent / f"{prefix}{hashlib.sha256(model.encode()).hexdigest()[:12]}"
    partial.mkdir(exist_ok=True)
    commit = fill(partial, progress)
    checked_model(partial, target.name)
    write_manifest(partial, model, progress, revision=commit)
    for path in (*partial.rglob("*"), partial):
        sync(path)
    partial.chmod(0o755)
    partial.rename(target)
    sync(target.parent)
    for leftover in target.parent.glob(f"{prefix}*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _copy(source: Path, directory: Path, progress: ProgressCallback) -> str | None:
    """Copies the files of a model; those that an earlier try copied whole stay. Returns its commit at the hub."""
    paths = model_files(source)
    total, done = sum(path.stat().st_size for path in paths), 0
    for path in paths:
        progress(f"Copying {path.name}", done, total)
        copy = directory / path.relative_to(source)
        if not copy.exists():
            copy.parent.mkdir(exist_ok=True)
            unfinished = copy.with_name(f".{path.name}.unfinished")
            shutil.copyfile(path, unfinished)
            if sha256_of(path) != sha256_of(unfinished):
                raise SetupError(
                    f"The copy of {path} has another SHA-256 than the file. Check both disks, then try again."
                )
            unfinished.rename(copy)
        done += path.stat().st_size
    for unfinished in directory.rglob(".*.unfinished"):
        unfinished.unlink()
    return revision_of(source)
