"""`pdserve key`: makes an API key, shows it once, and adds its digest to a file of keys."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pdserve.base.config import load, option, positional
from pdserve.base.errors import SetupError
from pdserve.cli.cluster_secrets.contents import key_table

#: As the router reads ids and tenants.
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyConfig:
    """Settings of `pdserve key`."""

    id: str = positional("", help="name of the key, for logs, limits and usage", metavar="ID")
    tenant: str | None = option(None, help="who shares cached prefixes and traces with it; default: the id")
    admin: bool = option(False, help="it may read metrics, the cluster, and the traces of all tenants")
    metrics: bool = option(False, help="it may read metrics, and do nothing else")
    file: str | None = option(
        None, help="TOML file of keys to add it to, which may be absent; default: the table is printed", metavar="FILE"
    )


def main(argv: Sequence[str]) -> int:
    """Prints the key; returns 0. Raises `SetupError`."""
    config = load(KeyConfig, "key", argv, description=__doc__)
    for name in (config.id, config.tenant or config.id):
        if not _NAME.fullmatch(name):
            raise SetupError(
                f"{name!r} is not a name. Give the key an id of 1 to 64 letters, digits, dots, dashes or underscores, "
                "such as `pdserve key search-team`."
            )
    if config.admin and config.metrics:
        raise SetupError("--metrics is for a key that may do nothing else. Leave --admin or --metrics out.")
    key = secrets.token_urlsafe(32)
    settings = [f'tenant = "{config.tenant}"'] if config.tenant is not None else []
    settings += [f"{name} = true" for name in ("admin", "metrics") if getattr(config, name)]
    table = key_table(config.id, key, *settings)
    if config.file is not None:
        _append(Path(config.file).expanduser(), config.id, table)
    print(f"The API key {config.id}, which is shown this once: {key}")
    print(f"Its digest is in {config.file}." if config.file else f"\nFor the file of --api-keys-file:\n\n{table}")
    return 0


def _append(path: Path, key_id: str, table: str) -> None:
    """Adds a table to a file of keys, so that a reader sees the file before it or after it. Raises `SetupError`."""
    if path.suffix == ".json":
        raise SetupError(f"{path} is JSON, and this command writes TOML. Leave --file out, and add the entry by hand.")
    try:
        # The directory, because the file is replaced.
        with _locked(path.parent):
            before = path.read_text(encoding="utf-8") if path.exists() else ""
            if key_id in _ids(before, path):
                raise SetupError(f"{path} has a key with the id {key_id}. Choose another id, or remove the old key.")
            _replace(path, f"{before.rstrip()}\n\n{table}".lstrip())
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise SetupError(f"Cannot add the key to {path}: {reason}. No key was made.") from error


def _ids(text: str, path: Path) -> set[object]:
    try:
        keys = tomllib.loads(text).get("keys", [])
    except tomllib.TOMLDecodeError as error:
        raise SetupError(f"{path} is not valid TOML: {error}. Correct it first.") from None
    return {entry.get("id") for entry in keys if isinstance(entry, dict)} if isinstance(keys, list) else set()


def _replace(path: Path, text: str) -> None:
    unfinished = path.with_name(f".{path.name}.new")
    mode = path.stat().st_mode & 0o777 if path.exists() else 0o640
    unfinished.unlink(missing_ok=True)
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        os.fchmod(descriptor, mode)
        file.write(text)
        file.flush()
        os.fsync(descriptor)
    unfinished.rename(path)


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Against another run of this command."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
