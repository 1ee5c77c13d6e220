"""Small JSON files that keep what was computed. Without one, or where none can be written, it is computed again."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from pdserve.base.errors import SetupError
from pdserve.model.fetch.cache import default_cache_dir
from pdserve.model.fields import Fields

_MAX_BYTES = 4096


def in_cache(*names: str) -> Path | None:
    """A file in the user's cache; None for a user without a home directory, as in some containers."""
    try:
        return default_cache_dir().joinpath(*names)
    except RuntimeError:
        return None


def read_kept(path: Path) -> Fields | None:
    """The content; None: the file is absent or damaged."""
    try:
        return Fields.read(path, _MAX_BYTES)
    except SetupError:
        return None


def keep(path: Path, content: Mapping[str, object]) -> bool:
    """Writes the file whole or not at all; False if that is not possible here."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(json.dumps(content) + "\n", encoding="utf-8")
        unfinished.replace(path)
    except OSError:
        return False
    return True
