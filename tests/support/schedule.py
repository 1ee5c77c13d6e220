"""Which tests stay together, and which come first, when several pytest processes share a run."""

from __future__ import annotations

from pathlib import Path

import pytest
from xdist.scheduler import LoadScopeScheduling

#: Folders whose tests share what takes long to start or to import, in one process. Few clusters run at a time, too.
_TOGETHER = ("tests/chaos", "tests/integration", "tests/golden")
#: What takes longest comes first, so that no process is left with it at the end.
_FIRST = (
    "tests/chaos",
    "tests/integration",
    "tests/property/model",
    "tests/unit/kernels",
    "tests/property",
    "tests/unit/engine",
    "tests/unit/cli",
)


def group(nodeid: str) -> str:
    """Tests of one group run in one process, in order: those of a folder that shares much, else those of one file."""
    file = nodeid.split("::")[0]
    folder = file.rpartition("/")[0]
    return folder if folder in _TOGETHER else file


class GroupScheduling(LoadScopeScheduling):
    """Hands whole groups to the processes, in the order of the collection."""

    def _split_scope(self, nodeid: str) -> str:
        return group(nodeid)


def _rank(item: pytest.Item, root: Path) -> int:
    path = item.path.relative_to(root).as_posix()
    return next((rank for rank, prefix in enumerate(_FIRST) if path.startswith(prefix)), len(_FIRST))


def arrange(config: pytest.Config, items: list[pytest.Item]) -> None:
    """When processes share the run, sorts the longest groups to the front."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: _rank(item, config.rootpath))
