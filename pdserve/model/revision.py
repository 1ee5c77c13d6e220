"""The commit of a hub's repository from which a model's directory was made. No torch."""

from __future__ import annotations

from pathlib import Path

from pdserve.base.errors import SetupError
from pdserve.model.fetch.hub_name import is_commit
from pdserve.model.fetch.manifest import read_manifest


def revision_of(model_dir: Path) -> str | None:
    """As the list of `pdserve fetch`, or the cache of the hub's client, names it; None for other directories."""
    try:
        manifest = read_manifest(model_dir)
    except SetupError:  # Only `pdserve fetch` minds.
        return None
    found = model_dir.name if manifest is None and model_dir.parent.name == "snapshots" else None
    found = found if manifest is None else manifest.revision
    return found if isinstance(found, str) and is_commit(found) else None
