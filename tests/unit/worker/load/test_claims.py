"""What a worker computes on after it has claimed it, and what it refuses."""

from __future__ import annotations

import asyncio
import os
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pdserve.base.errors import CapacityError, SetupError
from pdserve.net.admin import Health
from pdserve.observe.machine import Cores
from pdserve.worker.config import WorkerConfig
from pdserve.worker.load import claims
from pdserve.worker.load.claims import claim_when_free, claiming

USABLE = tuple(sorted(os.sched_getaffinity(0)))


def config(directory: Path, **settings: Any) -> WorkerConfig:
    return WorkerConfig(model="", redis_url="", claim_dir=str(directory), **settings)


@pytest.fixture
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "available_cores", lambda: Cores(ids=(0, 1, 2, 3), usable=4))


@pytest.fixture
def three_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda gpu: SimpleNamespace(uuid=f"uuid-{gpu}"))


def test_without_a_directory_nothing_is_claimed() -> None:
    plain = WorkerConfig(model="", redis_url="")
    with claiming(plain) as claimed:
        assert claimed is plain


@pytest.mark.usefixtures("four_cores")
def test_two_workers_divide_the_cores_and_lend_them(tmp_path: Path) -> None:
    directory = tmp_path / "shared" / "pdserve"
    with claiming(config(directory)) as one, claiming(config(directory)) as two, claiming(config(directory)) as three:
        assert (one.cpus, one.borrow_cpus) == ((0, 1), (2, 3))
        assert (two.cpus, two.borrow_cpus) == ((2, 3), (0, 1))
        assert one.core_leases == two.core_leases == str(directory / "cores")
        assert (three.cpus, three.threads, three.core_leases) == ((), 1, None)
    with claiming(config(directory)) as later:
        assert later.cpus == (0, 1)


def test_named_cores_are_claimed_and_refused_when_another_worker_has_them(tmp_path: Path) -> None:
    with claiming(config(tmp_path, cpus=USABLE[:1])) as one:
        assert (one.cpus, one.borrow_cpus) == (USABLE[:1], USABLE[1:])
        with (
            pytest.raises(SetupError, match=rf"--cpus names cores \[{USABLE[0]}\], which another worker has claimed"),
            claiming(config(tmp_path, cpus=USABLE)),
        ):
            pass
    with claiming(config(tmp_path, cpus=USABLE)) as all_cores:
        assert all_cores.cpus == USABLE


def test_under_a_quota_no_core_is_claimed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "available_cores", lambda: Cores(ids=tuple(range(64)), usable=2))
    with claiming(config(tmp_path)) as claimed:
        assert (claimed.cpus, claimed.threads, claimed.core_leases) == ((), None, None)


def test_an_unusable_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(SetupError, match=r"Cannot use --claim-dir .*/file/here: Not a directory"),
        claiming(config(tmp_path / "file" / "here")),
    ):
        pass


@pytest.mark.usefixtures("three_gpus")
def test_workers_claim_different_gpus_and_ranks_neighbours(tmp_path: Path) -> None:
    with claiming(config(tmp_path, device="cuda")) as one:
        assert one.device == "cuda:0"
        with claiming(config(tmp_path, device="cuda", tensor_parallel_size=2)) as two:
            assert two.device == "cuda:1"
            with (
                pytest.raises(CapacityError, match="needs 1 free GPU, but other workers have claimed too many of 3"),
                claiming(config(tmp_path, device="cuda")),
            ):
                pass
        with claiming(config(tmp_path, device="cuda:2")) as named:
            assert named.device == "cuda:2"
            with claiming(config(tmp_path, device="cuda")) as other:
                assert other.device == "cuda:1"


@pytest.mark.usefixtures("three_gpus")
@pytest.mark.parametrize("device", ["cuda:3", "cuda:x"])
def test_a_gpu_that_does_not_exist_is_left_to_the_check_of_the_device(device: str, tmp_path: Path) -> None:
    with claiming(config(tmp_path, device=device)) as claimed:
        assert claimed.device == device
    with claiming(config(tmp_path, device="cuda", tensor_parallel_size=4)) as claimed:
        assert claimed.device == "cuda"


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch, three_gpus: None) -> asyncio.Event:
    """A machine with one GPU; set when a worker has found that it is taken."""
    found_taken = asyncio.Event()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(claims.log, "error", lambda event, **fields: found_taken.set())
    return found_taken


async def test_a_worker_without_a_free_gpu_waits_for_one(tmp_path: Path, one_gpu: asyncio.Event) -> None:
    """Fails if it ends: the engine of its container would start it again and again."""
    health, stop = Health(), asyncio.Event()
    async with asyncio.timeout(30), AsyncExitStack() as stack:
        with claiming(config(tmp_path, device="cuda")):
            later = asyncio.create_task(claim_when_free(config(tmp_path, device="cuda"), stack, stop, health))
            await one_gpu.wait()
            assert health.describe()["reason"] == "waiting for a free GPU"
            assert not later.done()
        claimed = await later
        assert claimed is not None
        assert (claimed.device, health.not_ready) == ("cuda:0", "loading")


async def test_a_worker_that_waits_for_a_gpu_ends_on_request(tmp_path: Path, one_gpu: asyncio.Event) -> None:
    stop = asyncio.Event()
    async with asyncio.timeout(30), AsyncExitStack() as stack:
        with claiming(config(tmp_path, device="cuda")):
            later = asyncio.create_task(claim_when_free(config(tmp_path, device="cuda"), stack, stop, Health()))
            await one_gpu.wait()
            stop.set()
            assert await later is None
