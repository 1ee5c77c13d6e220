"""The memory that the largest steps take, as the last start measured it."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

from pdserve.model.kept_file import in_cache, keep, read_kept
from pdserve.worker.load.memory_profile import Activations

#: Packages whose code decides how much memory a step takes.
_PACKAGES = ("kernels", "pdserve.base", "pdserve.engine", "pdserve.model", "pdserve.worker")
_FOLDER = "activations"


def kept_activations(settings: Mapping[str, object], measure: Callable[[], Activations]) -> tuple[Activations, bool]:
    """What was measured for these settings, and True, or else what `measure` returns, which is kept, and False.

    `settings` have all that the memory depends on: model, sizes of steps, GPU, libraries. Our code is added to them.
    """
    path = in_cache(_FOLDER, f"{_digest(settings)}.json")
    code = _digest(sorted(_sources()))
    if path is not None and (kept := read_kept(path)) is not None and kept.raw("code") == code:
        peak, graphs = kept.raw("peak"), kept.raw("graphs")
        if isinstance(peak, int) and isinstance(graphs, int):
            return Activations(peak=peak, graphs=graphs), True
    measured = measure()
    if path is not None:
        keep(path, {"code": code, **asdict(measured)})
    return measured, False


def _digest(value: object) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).hexdigest()


def forget_activations() -> None:
    """Everything is measured again from the next start on, since a measurement was too small."""
    folder = in_cache(_FOLDER)
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def _sources() -> Iterator[tuple[str, str]]:
    """Name and text of each module."""
    for package in _PACKAGES:
        spec = find_spec(package)
        assert spec is not None
        for directory in map(Path, spec.submodule_search_locations or ()):
            for path in directory.rglob("*.py"):
                yield f"{package}/{path.relative_to(directory)}", path.read_text(encoding="utf-8")
