"""Which tests stay together, and which come first, when several pytest processes share a run."""

from __future__ import annotations

from pathlib import Path

import pytest

#: Folders whose tests start clusters. Each stays in one process: clusters are shared, and few run at a time.
_CLUSTERS = ("tests/chaos", "tests/integration")
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


def group(item: pytest.Item) -> str:
    """Tests of one group run in one process, in order: those of a folder with clusters, else those of one file."""
    file = item.nodeid.split("::")[0]
    folder = file.rpartition("/")[0]
    return folder if folder in _CLUSTERS else file


def _rank(item: pytest.Item, root: Path) -> int:
    path = item.path.relative_to(root).as_posix()
    return next((rank for rank, prefix in enumerate(_FIRST) if path.startswith(prefix)), len(_FIRST))


def arrange(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks each test with its group and, when processes share the run, sorts the longest groups to the front."""
    if not config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        return
    for item in items:
        item.add_marker(pytest.mark.xdist_group(group(item)))
    items.sort(key=lambda item: _rank(item, config.rootpath))
