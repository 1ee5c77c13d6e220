"""What `pdserve up` decides about this machine, and how it says so."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pdserve.base.errors import SetupError
from pdserve.cli import up
from pdserve.cli.placement import Cores, CoreShare, GpuShare
from pdserve.cli.up import can_lend, drawbacks, gpu_shares, require_gpus_apart
from pdserve.cli.up_config import UpConfig
from pdserve.cli.up_console import UpConsole, describe_plan
from pdserve.cli.up_model import PreparedModel
from pdserve.cli.up_redis import RedisPlan

MODEL = PreparedModel(path=Path("/models/one"), served_name="one")
REDIS = RedisPlan(url="redis://127.0.0.1:1", spec=None)


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(up, "available_cores", lambda: Cores(ids=(0, 1, 2, 3), usable=4))


def shares(config: UpConfig) -> list[CoreShare]:
    return list(up.make_plan(config, MODEL, REDIS, run_dir=Path("/run"), log_dir=Path("/logs")).shares)


def test_workers_lend_their_cores_unless_told_not_to() -> None:
    assert [share.borrow_cpus for share in shares(UpConfig())] == [(2, 3), (0, 1)]
    assert [share.borrow_cpus for share in shares(UpConfig(lend_cores=False))] == [(), ()]


def test_workers_without_cores_of_their_own_lend_none() -> None:
    assert shares(UpConfig(threads_per_worker=3)) == [CoreShare(threads=3)] * 2


def test_the_plan_is_told_worker_by_worker() -> None:
    names = ["prefill-0", "decode-0", "decode-1"]
    told = [
        CoreShare(threads=2, cpus=(0, 1), borrow_cpus=(2,)),
        CoreShare(threads=1, cpus=(2,)),
        CoreShare(threads=1),
    ]
    assert describe_plan(names, told, [], 1 << 30) == [
        "  prefill-0: 2 threads on cores 0,1, and on core 2 when idle, 1.0 GiB of KV cache",
        "  decode-0: 1 thread on core 2, 1.0 GiB of KV cache",
        "  decode-1: 1 thread on any core, 1.0 GiB of KV cache",
    ]


def test_workers_on_gpus_are_told_their_part_of_them() -> None:
    config = UpConfig(device="cuda:3", prefill=1, decode=1)
    gpus = gpu_shares(config)
    assert gpus == [GpuShare(device="cuda:3", memory=0.45)] * 2
    assert describe_plan(["prefill-0", "decode-0"], [CoreShare(threads=1)] * 2, gpus, None) == [
        "  prefill-0: 45% of cuda:3",
        "  decode-0: 45% of cuda:3",
    ]
    assert gpu_shares(UpConfig()) == []


def test_workers_of_several_ranks_lend_no_cores_and_have_several_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(up, "num_gpus", lambda: 6)
    config = UpConfig(device="cuda:2", tensor_parallel_size=4, prefill_tensor_parallel_size=2, decode=2)
    assert gpu_shares(config) == [
        GpuShare(device="cuda:2", memory=0.3, num_ranks=2),
        *[GpuShare(device="cuda:2", memory=0.3, num_ranks=4)] * 2,
    ]
    assert can_lend(UpConfig())
    assert not can_lend(UpConfig(lend_cores=False))
    assert not can_lend(UpConfig(device="cuda"))
    assert not can_lend(UpConfig(decode_tensor_parallel_size=2))


def test_ranks_beyond_the_last_gpu_are_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(up, "num_gpus", lambda: 5)
    with pytest.raises(SetupError, match="cuda:2 to cuda:5, and this machine has 5 GPUs"):
        gpu_shares(UpConfig(device="cuda:2", decode_tensor_parallel_size=4))
    assert len(gpu_shares(UpConfig(device="cuda:1", decode_tensor_parallel_size=4))) == 2


@pytest.mark.parametrize(
    ("gpus", "slow"),
    [
        ([("cuda:0", 2), ("cuda:2", 2)], False),
        ([("cuda:0", 2), ("cuda:1", 2)], True),
        ([("cuda:0", 2), ("cuda:1", 1)], True),
        ([("cuda:0", 1), ("cuda:0", 1)], False),
        ([("cuda:0", 1), ("cuda:0", 1), ("cuda:1", 2)], False),
    ],
)
def test_workers_of_several_ranks_that_share_gpus_are_told_to_be_slow(gpus: list[tuple[str, int]], slow: bool) -> None:
    told = drawbacks(UpConfig(), [GpuShare(device=device, memory=0.4, num_ranks=size) for device, size in gpus])
    assert ["share GPUs" in line for line in told] == [True] * slow


@pytest.mark.parametrize(
    ("num_gpus", "changes", "shared"),
    [
        (2, {}, None),
        (3, {"prefill": 2}, None),
        (4, {"device": "cuda:1", "prefill": 0}, None),
        (1, {}, "cuda:0"),
        (2, {"prefill": 2, "decode": 2}, "cuda:0 and cuda:1"),
        (4, {"device": "cuda:1"}, "cuda:1"),
    ],
)
def test_tiers_between_which_nccl_is_to_carry_blocks_share_no_gpu(
    monkeypatch: pytest.MonkeyPatch, num_gpus: int, changes: dict[str, Any], shared: str | None
) -> None:
    monkeypatch.setattr(up, "num_gpus", lambda: num_gpus)
    config = UpConfig(**{"device": "cuda", "transport": "nccl", "handover_memory": "device"} | changes)
    require_gpus_apart(replace(config, transport="ucx"))
    require_gpus_apart(replace(config, handover_memory="host"))
    if shared is None:
        require_gpus_apart(config)
    else:
        with pytest.raises(SetupError, match=f"--transport nccl with --handover-memory device .* are on {shared}: use"):
            require_gpus_apart(config)


def test_tiers_on_one_gpu_are_refused_before_a_model_is_fetched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(up, "require_free_ports", lambda _: None)
    config = UpConfig(device="cuda:0", transport="nccl", handover_memory="device", log_dir=str(tmp_path / "logs"))
    with pytest.raises(SetupError, match="are on cuda:0"):
        asyncio.run(up._Up(config, UpConsole()).run())
    assert not list(tmp_path.iterdir())


def test_tiers_of_different_sizes_are_told_what_that_means() -> None:
    assert drawbacks(UpConfig(tensor_parallel_size=2), []) == []
    [line] = drawbacks(UpConfig(decode_tensor_parallel_size=2), [])
    assert "(prefill 1, decode 2)" in line
