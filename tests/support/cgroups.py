"""Cgroups of tests, of version 1 or 2: a share of the cores for all processes together, and a freezer. Root's alone."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_PERIOD_US = 100_000


@contextmanager
def quota(cores: float) -> Iterator[Path]:
    """A group with this quota; yields the file that takes its processes. Raises `OSError` where none can be made."""
    with _group("cpu") as group:
        budget = int(cores * _PERIOD_US)
        if _is_version_2():
            (group / "cpu.max").write_text(f"{budget} {_PERIOD_US}")
        else:
            (group / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(budget))
        yield group / "cgroup.procs"


@contextmanager
def frozen(*, every_s: float, for_s: float) -> Iterator[Path]:
    """A group that stands still for `for_s` once every `every_s`, with processes in sessions of their own.

    Yields the file that takes its processes. Raises `OSError` where no group can be made.
    """
    with _group("freezer") as group:
        is_over = threading.Event()
        name, on, off = ("cgroup.freeze", "1", "0") if _is_version_2() else ("freezer.state", "FROZEN", "THAWED")

        def run() -> None:
            while not is_over.wait(every_s):
                (group / name).write_text(on)
                is_over.wait(for_s)
                (group / name).write_text(off)

        thread = threading.Thread(target=run, name="freezer")
        thread.start()
        try:
            yield group / "cgroup.procs"
        finally:
            is_over.set()
            thread.join()
            (group / name).write_text(off)


def joining(members: Path, command: Sequence[str]) -> list[str]:
    """The command line of a process that enters a group and then becomes `command`."""
    return ["sh", "-c", f'echo $$ > {members} && exec "$@"', "sh", *command]


def _is_version_2() -> bool:
    return (_ROOT / "cgroup.controllers").exists()


@contextmanager
def _group(controller: str) -> Iterator[Path]:
    group = (_ROOT if _is_version_2() else _ROOT / controller) / f"pdserve-tests-{os.getpid()}"
    group.mkdir()
    try:
        yield group
    finally:
        # The kernel may still count a process that has ended.
        with suppress(OSError):
            group.rmdir()
