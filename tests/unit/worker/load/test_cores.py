"""The cores a worker uses, and the settings it refuses before it loads anything."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from pdserve.base.errors import SetupError
from pdserve.worker.config import WorkerConfig
from pdserve.worker.load.core_leases import MAX_CPUS
from pdserve.worker.load.cores import open_core_leases, require_cpus

USABLE = tuple(sorted(os.sched_getaffinity(0)))
UNAVAILABLE = 100_000


def config(**settings: Any) -> WorkerConfig:
    return WorkerConfig(model="", redis_url="", **settings)


@pytest.mark.parametrize("flag", ["cpus", "borrow_cpus"])
def test_unavailable_cores_are_named(flag: str) -> None:
    settings = {"cpus": USABLE[:1], "core_leases": "cores", flag: (UNAVAILABLE,)}
    with pytest.raises(SetupError, match=rf"--{flag.replace('_', '-')} names cores \[{UNAVAILABLE}\]"):
        require_cpus(config(**settings))


@pytest.mark.parametrize("settings", [{"core_leases": "cores"}, {"cpus": USABLE[1:2]}])
def test_borrowing_needs_cores_of_ones_own_and_a_lease_file(settings: dict[str, Any]) -> None:
    with pytest.raises(SetupError, match=r"needs --cpus.*--core-leases"):
        require_cpus(config(borrow_cpus=USABLE[:1], **settings))


def test_a_worker_cannot_borrow_from_itself() -> None:
    with pytest.raises(SetupError, match="which --cpus already gives to this worker"):
        require_cpus(config(cpus=USABLE, borrow_cpus=USABLE[:1], core_leases="cores"))


def test_without_cores_of_its_own_or_a_lease_file_a_worker_lends_nothing(tmp_path: Path) -> None:
    assert open_core_leases(config(core_leases=str(tmp_path / "cores"))) is None
    assert open_core_leases(config(cpus=(0,))) is None
    assert open_core_leases(config(cpus=(0,), core_leases=str(tmp_path / "cores"))) is not None


def test_an_unusable_lease_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "nowhere" / "cores"
    with pytest.raises(SetupError, match=rf"Cannot use --core-leases {path}: No such file"):
        open_core_leases(config(cpus=(0,), core_leases=str(path)))


def test_a_core_beyond_the_lease_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=f"supports cores 0 to {MAX_CPUS - 1}"):
        open_core_leases(config(cpus=(MAX_CPUS,), core_leases=str(tmp_path / "cores")))
