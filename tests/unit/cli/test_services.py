"""The command lines of a cluster's processes, checked against what the services themselves accept."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from decode_svc.config import DecodeConfig
from pdserve.base.config import add_options, from_arguments
from pdserve.cli.cluster_plan import ClusterPlan, PreparedModel
from pdserve.cli.placement import CoreShare, GpuShare
from pdserve.cli.run_dir import private_directory
from pdserve.cli.services import router_spec, worker_specs
from pdserve.cli.supervisor.spec import ProcessSpec
from pdserve.cli.up_config import DEFAULT_MODEL, UpConfig
from pdserve.cli.up_secret import own_secret, secret_of_run
from pdserve.model import resolve
from pdserve.peers.secret import SECRET_VARIABLE
from prefill_svc.config import PrefillConfig
from router_svc.config import RouterConfig


def plan(**changes: object) -> ClusterPlan:
    settings: dict[str, object] = {
        "config": UpConfig(prefill=1, decode=2),
        "models": [PreparedModel(path=Path("/models/one"), served_name="one")],
        "redis_url": "redis://:secret@127.0.0.1:1",
        "log_dir": Path("/logs"),
        "shares": [CoreShare(threads=2, cpus=(0, 1)), CoreShare(threads=1, cpus=(2,)), CoreShare(threads=1)],
        "kv_cache_bytes": 1 << 30,
        "core_leases": Path("/run/cores"),
        "id_prefix": "",
        "environment": {"PATH": "/bin"},
        **changes,
    }
    return ClusterPlan(**settings)  # type: ignore[arg-type]


def parsed(spec: ProcessSpec, cls: type[Any], service: str) -> Any:
    """The settings the service reads from its flags and environment."""
    parser = argparse.ArgumentParser()
    add_options(parser, cls)
    flags = spec.argv[spec.argv.index("-m") + 2 :]
    return from_arguments(cls, service, parser.parse_args(flags), spec.environment)


def test_a_prefill_worker_accepts_its_flags() -> None:
    spec = worker_specs(plan(id_prefix="host-"))[0]
    config = parsed(spec, PrefillConfig, "prefill_svc")
    assert spec.name == "prefill-0"
    assert config.worker_id == "host-prefill-0"
    assert config.model_dir == Path("/models/one")
    assert config.served_model_name == "one"
    assert (config.threads, config.cpus) == (2, (0, 1))
    assert config.kv_cache_memory == 1 << 30


def test_a_decode_worker_without_its_own_cores_is_not_pinned() -> None:
    spec = worker_specs(plan())[2]
    config = parsed(spec, DecodeConfig, "decode_svc")
    assert spec.name == config.worker_id == "decode-1"
    assert (config.threads, config.cpus) == (1, ())


def test_workers_on_gpus_get_their_device_and_share_of_its_memory() -> None:
    config = UpConfig(prefill=1, decode=2, device="cuda", deterministic=False, enforce_eager=True)
    gpus = [GpuShare(device=f"cuda:{index}", memory=0.5) for index in range(3)]
    decode = parsed(worker_specs(plan(config=config, gpus=gpus, kv_cache_bytes=None))[2], DecodeConfig, "decode_svc")
    assert (decode.device, decode.gpu_memory_utilization, decode.kv_cache_memory) == ("cuda:2", 0.5, None)
    assert (decode.deterministic, decode.enforce_eager) == (False, True)
    assert parsed(worker_specs(plan())[2], DecodeConfig, "decode_svc").device == "cpu"


def test_each_tier_has_its_number_of_ranks() -> None:
    config = UpConfig(prefill=1, decode=2, tensor_parallel_size=2, decode_tensor_parallel_size=4)
    first, *_, last = worker_specs(plan(config=config))
    assert parsed(first, PrefillConfig, "prefill_svc").tensor_parallel_size == 2
    assert parsed(last, DecodeConfig, "decode_svc").tensor_parallel_size == 4


def test_both_tiers_get_the_dtype_of_the_kv_cache() -> None:
    config = UpConfig(prefill=1, decode=2, kernels="reference", kv_cache_dtype="fp8_e4m3")
    prefill, _, decode = worker_specs(plan(config=config))
    assert parsed(prefill, PrefillConfig, "prefill_svc").kv_cache_dtype == "fp8_e4m3"
    assert parsed(decode, DecodeConfig, "decode_svc").kv_cache_dtype == "fp8_e4m3"
    assert parsed(worker_specs(plan())[0], PrefillConfig, "prefill_svc").kv_cache_dtype == "auto"


def test_workers_that_may_decode_get_the_number_of_layer_groups() -> None:
    specs = worker_specs(plan(config=UpConfig(prefill=1, decode=2, layer_groups=3)))
    services = ("prefill_svc", "decode_svc", "decode_svc")
    groups = [parsed(spec, DecodeConfig, name).layer_groups for spec, name in zip(specs, services, strict=True)]
    assert groups == [3, 3, 3]
    assert parsed(worker_specs(plan())[2], DecodeConfig, "decode_svc").layer_groups is None


@pytest.mark.parametrize(
    "fixed", [{"device": "cuda"}, {"prefill_tensor_parallel_size": 2}, {"transport": "nccl"}], ids=str
)
def test_workers_change_roles_on_cpus_with_one_rank(fixed: dict[str, object]) -> None:
    def modules(**changes: object) -> list[str]:
        config = UpConfig(prefill=1, decode=1, layer_groups=3, **changes)  # type: ignore[arg-type]
        gpus = [GpuShare(device="cuda:0", memory=0.5)] * 2 if config.device == "cuda" else ()
        specs = worker_specs(plan(config=config, shares=[CoreShare(threads=1)] * 2, gpus=gpus))
        assert any("layer-groups" in argument for argument in specs[0].argv) == ("worker_svc.prefill" in specs[0].argv)
        return [spec.argv[spec.argv.index("-m") + 1] for spec in specs]

    assert modules() == ["worker_svc.prefill", "worker_svc.decode"]
    assert modules(**fixed)[0] == "prefill_svc"


def test_workers_get_the_cores_they_may_borrow_and_the_file_of_leases() -> None:
    shares = [CoreShare(threads=2, cpus=(0, 1), borrow_cpus=(2, 3)), CoreShare(threads=1), CoreShare(threads=1)]
    prefill, decode = worker_specs(plan(shares=shares))[:2]
    borrowing = parsed(prefill, PrefillConfig, "prefill_svc")
    assert (borrowing.borrow_cpus, borrowing.core_leases) == ((2, 3), "/run/cores")
    alone = parsed(decode, DecodeConfig, "decode_svc")
    assert (alone.borrow_cpus, alone.core_leases) == ((), None)


def test_the_router_accepts_its_flags() -> None:
    config = UpConfig(
        host="0.0.0.0", port=9000, prefill=0, local_prefill_threshold=7, local_prefill="threshold", drain_timeout_s=3.0
    )
    router = parsed(router_spec(plan(config=config)), RouterConfig, "router_svc")
    assert (router.host, router.port, router.effective_grpc_port) == ("0.0.0.0", 9000, 9001)
    assert (router.prefill_expected, router.local_prefill_threshold) == (0, 7)
    assert router.local_prefill == "threshold"
    assert router.drain_timeout_s == 3.0


def test_bounds_of_files_and_batches_given_to_up_reach_the_router() -> None:
    config = UpConfig(max_file=2**20, batch_max_num_seqs=7)
    router = parsed(router_spec(plan(config=config)), RouterConfig, "router_svc")
    assert (router.max_file, router.batch_max_num_seqs) == (2**20, 7)


def test_limits_given_to_up_reach_both_tiers() -> None:
    config = UpConfig(block_size=8, max_model_len=100, max_num_seqs=3, max_num_batched_tokens=64, transport="nccl")
    specs = worker_specs(plan(config=config, shares=[CoreShare(threads=1)] * 2))
    for spec, cls, service in zip(specs, (PrefillConfig, DecodeConfig), ("prefill_svc", "decode_svc"), strict=True):
        worker = parsed(spec, cls, service)
        assert (worker.block_size, worker.max_model_len) == (8, 100)
        assert (worker.max_num_batched_tokens, worker.transport) == (64, "nccl")
    assert worker.max_num_seqs == 3


def test_settings_not_given_to_up_keep_the_services_default() -> None:
    worker = parsed(worker_specs(plan())[0], PrefillConfig, "prefill_svc")
    default = PrefillConfig(model="", redis_url="")
    assert (worker.max_num_batched_tokens, worker.max_prompt_tokens) == (None, default.max_prompt_tokens)
    assert worker.block_size == default.block_size


def test_the_redis_password_is_not_on_the_command_line() -> None:
    cluster = plan()
    for spec in (router_spec(cluster), *worker_specs(cluster)):
        assert not any("secret" in argument for argument in spec.argv)
    assert parsed(router_spec(cluster), RouterConfig, "router_svc").redis_url == cluster.redis_url


def test_api_keys_reach_the_router_alone_and_not_on_the_command_line() -> None:
    cluster = plan(config=UpConfig(prefill=1, decode=2, api_key=("key-one", "key-two")))
    router, workers = router_spec(cluster), worker_specs(cluster)
    assert parsed(router, RouterConfig, "router_svc").api_key == ("key-one", "key-two")
    assert not any("key-one" in argument for spec in (router, *workers) for argument in spec.argv)
    assert not any("key-one" in value for spec in workers for value in spec.environment.values())


def test_thread_pools_of_libraries_are_bounded_by_the_workers_threads() -> None:
    specs = worker_specs(plan())
    assert [spec.environment["OMP_NUM_THREADS"] for spec in specs] == ["2", "1", "1"]
    assert all(spec.environment["PATH"] == "/bin" for spec in specs)


def test_the_router_stops_before_the_workers_and_has_time_to_drain() -> None:
    cluster = plan(config=UpConfig(prefill=1, decode=2, drain_timeout_s=100.0))
    router, worker = router_spec(cluster), worker_specs(cluster)[0]
    assert router.stop_stage < worker.stop_stage
    assert router.stop_grace_s > 100.0


@pytest.mark.parametrize("name", ["prefill-0", "decode-0", "decode-1"])
def test_each_process_has_its_own_log(name: str) -> None:
    assert {spec.name: spec.log_path for spec in worker_specs(plan())}[name] == Path(f"/logs/{name}.log")


def test_the_default_model_is_an_alias_that_needs_no_model_hub() -> None:
    assert DEFAULT_MODEL == resolve.DEFAULT_MODEL
    assert DEFAULT_MODEL in resolve.ALIASES


def test_the_cluster_secret_is_not_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    made = own_secret(UpConfig(), tmp_path)
    cluster = plan(environment={"PATH": "/bin", **made})
    for spec in (router_spec(cluster), *worker_specs(cluster)):
        assert spec.environment[SECRET_VARIABLE] == made[SECRET_VARIABLE]
        assert not any(made[SECRET_VARIABLE] in argument for argument in spec.argv)


def test_a_run_has_a_secret_of_its_own_unless_the_user_has_one_or_others_may_join(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    assert own_secret(UpConfig(), tmp_path) != own_secret(UpConfig(), tmp_path)
    assert own_secret(UpConfig(redis_url="redis://redis:6379"), tmp_path) == {}
    file = tmp_path / "secret"
    file.write_text("the-secret-of-this-cluster")
    assert own_secret(UpConfig(cluster_secret_file=str(file)), tmp_path) == {}
    monkeypatch.setenv(SECRET_VARIABLE, "the-secret-of-the-user")
    assert own_secret(UpConfig(), tmp_path) == {}


def test_doctor_finds_the_secret_of_this_users_run_on_this_machine_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with private_directory() as other, private_directory() as mine:
        own_secret(UpConfig(port=8001), other)
        made = own_secret(UpConfig(), mine)
        [file] = mine.glob("cluster-secret-*")
        assert (file.stat().st_mode & 0o777, mine.stat().st_mode & 0o777) == (0o600, 0o700)
        found = secret_of_run("http://127.0.0.1:8000")
        assert found is not None
        assert found.keys == (made[SECRET_VARIABLE].encode(),)
        assert secret_of_run("http://10.0.0.1:8000") is None
        assert secret_of_run("http://127.0.0.1:8002") is None
    assert secret_of_run("http://127.0.0.1:8000") is None
