"""How `pdserve up` divides a machine, what it refuses and what it warns about."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pdserve.base.errors import SetupError
from pdserve.cli import up
from pdserve.cli.cluster_plan import (
    ClusterPlan,
    PreparedModel,
    RedisPlan,
    RunEnvironment,
    can_lend,
    for_one_gpu,
    gpu_shares,
    make_plan,
    plan_warnings,
    require_separate_gpus,
)
from pdserve.cli.placement import CoreShare, GpuShare, Hardware
from pdserve.cli.supervisor.spec import ProcessSpec
from pdserve.cli.up_config import UpConfig
from pdserve.cli.up_console import UpConsole, describe_plan
from pdserve.observe.machine import Cores

MODEL = PreparedModel(path=Path("/models/one"), served_name="one")
EXTERNAL_REDIS = RedisPlan(url="redis://127.0.0.1:1", spec=None)
PRIVATE_REDIS = RedisPlan(
    url="unix:///run/redis.sock",
    spec=ProcessSpec(name="redis", argv=(), environment={}, log_path=Path("/logs/redis.log")),
)
RUN = RunEnvironment(
    hardware=Hardware(cores=Cores(ids=(0, 1, 2, 3), usable=4), num_gpus=2, free_memory_bytes=10 << 30),
    hostname="host",
    run_dir=Path("/run"),
    log_dir=Path("/logs"),
    variables={"PATH": "/bin"},
    python_flags=("-P",),
)


def plan(config: UpConfig, redis: RedisPlan = EXTERNAL_REDIS) -> ClusterPlan:
    return make_plan(config, [MODEL], redis, RUN)


def test_workers_lend_their_cores_unless_switched_off() -> None:
    assert [share.borrow_cpus for share in plan(UpConfig()).shares] == [(2, 3), (0, 1)]
    assert [share.borrow_cpus for share in plan(UpConfig(lend_cores=False)).shares] == [(), ()]


@pytest.mark.parametrize(
    ("settings", "num_gpus", "prefill"),
    [
        ({"device": "cuda"}, 1, 0),
        ({"device": "cuda:1"}, 8, 0),
        ({"device": "cuda", "prefill": 1}, 1, 1),
        ({"device": "cuda"}, 2, 1),
        ({}, 1, 1),
    ],
)
def test_workers_that_would_share_one_gpu_are_a_single_one(
    settings: dict[str, Any], num_gpus: int, prefill: int
) -> None:
    config = for_one_gpu(UpConfig(**settings), num_gpus)
    assert (config.prefill_per_model, config.decode) == (prefill, 1)


def test_unpinned_workers_lend_no_cores() -> None:
    assert plan(UpConfig(threads_per_worker=3)).shares == [CoreShare(threads=3)] * 2


def test_the_kv_cache_is_sized_by_the_plan_on_cpus_and_by_the_worker_on_gpus() -> None:
    assert plan(UpConfig()).kv_cache_bytes == 1 << 30
    assert plan(UpConfig(kv_cache_memory=123)).kv_cache_bytes == 123
    assert plan(UpConfig(device="cuda")).kv_cache_bytes is None


def test_the_kv_cache_is_sized_with_the_weights_of_all_workers_in_mind() -> None:
    heavy = replace(MODEL, weight_bytes=3 << 30)
    made = make_plan(UpConfig(), [heavy], EXTERNAL_REDIS, RUN)
    assert made.kv_cache_bytes is not None
    # A fifth of the 4 GiB that two copies of the weights leave, for two workers.
    assert made.kv_cache_bytes == pytest.approx(0.4 * (1 << 30), rel=0.01)
    assert 2 * (made.kv_cache_bytes + heavy.weight_bytes) < RUN.hardware.free_memory_bytes


def test_where_two_copies_of_the_weights_do_not_fit_one_worker_is_suggested_with_the_numbers() -> None:
    with pytest.raises(
        SetupError,
        match=r"The workers \(2\) need 12\.0 GiB of memory, and 10\.0 GiB is free: each has about 6\.0 GiB of weights "
        r"and 1 MiB of KV cache\. --prefill 0 needs 6\.0 GiB: decode workers then also prefill\.",
    ):
        make_plan(UpConfig(), [replace(MODEL, weight_bytes=6 << 30)], EXTERNAL_REDIS, RUN)
    made = make_plan(UpConfig(prefill=0), [replace(MODEL, weight_bytes=6 << 30)], EXTERNAL_REDIS, RUN)
    assert made.kv_cache_bytes == pytest.approx(0.8 * (1 << 30), rel=0.01)


@pytest.mark.parametrize(
    ("config", "weights", "advice"),
    [
        (UpConfig(prefill=0), 11, "Use a smaller model, --quantization int8"),
        (UpConfig(prefill=0, kv_cache_memory=6 << 30), 5, "Lower --kv-cache-memory"),
        (UpConfig(kv_cache_memory=4 << 30), 4, "--prefill 0 needs 8.0 GiB"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_would(config: UpConfig, weights: int, advice: str) -> None:
    with pytest.raises(SetupError, match=advice):
        make_plan(config, [replace(MODEL, weight_bytes=weights << 30)], EXTERNAL_REDIS, RUN)


def test_the_plan_carries_the_run_and_the_name_clients_use() -> None:
    made = plan(UpConfig(served_model_name=("mine",)))
    assert made.models == [replace(MODEL, served_name="mine")]
    assert (made.log_dir, made.core_leases) == (Path("/logs"), Path("/run/cores"))
    assert (made.environment, made.python_flags) == ({"PATH": "/bin"}, ("-P",))
    assert plan(UpConfig()).models == [MODEL]


def test_worker_ids_name_host_and_port_in_a_redis_that_other_clusters_may_share() -> None:
    assert plan(UpConfig(port=9000)).id_prefix == "host-9000-"
    assert plan(UpConfig(port=9000), PRIVATE_REDIS).id_prefix == ""


def test_the_plan_is_described_worker_by_worker() -> None:
    names = ["prefill-0", "decode-0", "decode-1"]
    shares = [
        CoreShare(threads=2, cpus=(0, 1), borrow_cpus=(2,)),
        CoreShare(threads=1, cpus=(2,)),
        CoreShare(threads=1),
    ]
    assert describe_plan(names, shares, [], 1 << 30) == [
        "  prefill-0: 2 threads on cores 0,1, and on core 2 when idle, 1.0 GiB of KV cache",
        "  decode-0: 1 thread on core 2, 1.0 GiB of KV cache",
        "  decode-1: 1 thread on any core, 1.0 GiB of KV cache",
    ]


def test_workers_on_gpus_are_described_with_their_share_of_memory() -> None:
    config = UpConfig(device="cuda:3", prefill=1, decode=1)
    gpus = gpu_shares(config, 4)
    assert gpus == [GpuShare(device="cuda:3", memory=0.45)] * 2
    assert describe_plan(["prefill-0", "decode-0"], [CoreShare(threads=1)] * 2, gpus, None) == [
        "  prefill-0: 45% of cuda:3",
        "  decode-0: 45% of cuda:3",
    ]
    assert gpu_shares(UpConfig(), 4) == []


def test_workers_of_several_ranks_lend_no_cores_and_have_several_gpus() -> None:
    config = UpConfig(device="cuda:2", tensor_parallel_size=4, prefill_tensor_parallel_size=2, decode=2)
    assert gpu_shares(config, 6) == [
        GpuShare(device="cuda:2", memory=0.3, num_ranks=2),
        *[GpuShare(device="cuda:2", memory=0.3, num_ranks=4)] * 2,
    ]
    assert can_lend(UpConfig())
    assert not can_lend(UpConfig(lend_cores=False))
    assert not can_lend(UpConfig(device="cuda"))
    assert not can_lend(UpConfig(decode_tensor_parallel_size=2))


def test_ranks_beyond_the_last_gpu_are_refused_before_anything_starts() -> None:
    with pytest.raises(SetupError, match="cuda:2 to cuda:5, but this machine has 5 GPUs"):
        gpu_shares(UpConfig(device="cuda:2", decode_tensor_parallel_size=4), 5)
    assert len(gpu_shares(UpConfig(device="cuda:1", decode_tensor_parallel_size=4), 5)) == 2


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
def test_ranks_of_several_workers_on_one_gpu_get_a_warning(gpus: list[tuple[str, int]], slow: bool) -> None:
    warnings = plan_warnings(UpConfig(), [GpuShare(device=device, memory=0.4, num_ranks=size) for device, size in gpus])
    assert ["share GPUs" in line for line in warnings] == [True] * slow


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
def test_nccl_between_gpus_needs_tiers_on_different_gpus(
    num_gpus: int, changes: dict[str, Any], shared: str | None
) -> None:
    config = UpConfig(**{"device": "cuda", "transport": "nccl", "handover_memory": "device"} | changes)
    require_separate_gpus(replace(config, transport="ucx"), num_gpus)
    require_separate_gpus(replace(config, handover_memory="host"), num_gpus)
    if shared is None:
        require_separate_gpus(config, num_gpus)
    else:
        with pytest.raises(
            SetupError, match=f"--transport nccl with --handover-memory device .* both tiers use {shared}. Use"
        ):
            require_separate_gpus(config, num_gpus)


def test_tiers_on_one_gpu_are_refused_before_a_model_is_fetched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(up, "require_free_ports", lambda _: None)
    config = UpConfig(
        device="cuda:0", prefill=1, transport="nccl", handover_memory="device", log_dir=str(tmp_path / "logs")
    )
    with pytest.raises(SetupError, match="both tiers use cuda:0"):
        asyncio.run(up.run(config, UpConsole()))
    assert not list(tmp_path.iterdir())


def test_tiers_with_different_numbers_of_ranks_get_a_warning() -> None:
    assert plan_warnings(UpConfig(tensor_parallel_size=2), []) == []
    [line] = plan_warnings(UpConfig(decode_tensor_parallel_size=2), [])
    assert "(prefill 1, decode 2)" in line
