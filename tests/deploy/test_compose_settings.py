"""The settings of the services in the compose files, read as the services read them."""

from __future__ import annotations

import dataclasses
import shlex
from datetime import UTC, datetime
from typing import Any

import pytest

from decode_svc.config import DecodeConfig
from pdserve.base.config import load as load_settings
from pdserve.cli.cluster_secrets.certificates import PEER_NAME
from pdserve.cli.cluster_secrets.contents import READERS, new_secrets
from pdserve.cli.doctor import DoctorConfig
from pdserve.cli.drain import DrainConfig
from pdserve.cli.fetch import FetchConfig
from pdserve.cli.rebalance import RebalanceConfig
from pdserve.cli.role import RoleConfig
from pdserve.cli.status import StatusConfig
from pdserve.cli.trace import TraceConfig
from prefill_svc.config import PrefillConfig
from router_svc.config import RouterConfig
from tests.deploy.compose_files import BASE, GPU, ONE_GPU, WORKERS, has_gpus, load, seconds
from tests.deploy.dockerfile import environment

#: What a worker needs after its drain to close its sockets.
CLOSE_S = 20


def settings_of(service: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    configs = {"prefill_svc": PrefillConfig, "router_svc": RouterConfig}
    module, *flags = shlex.split(service.get("command", "router_svc"))
    # A worker of both tiers has the settings of the tier in which it starts.
    name = f"{module.removeprefix('worker_svc.').removesuffix('_svc')}_svc"
    monkeypatch.setattr("pdserve.base.addresses.own_address", lambda: "172.18.0.5")
    _set_environment(service, monkeypatch)
    return load_settings(configs.get(module, DecodeConfig), name, flags)  # type: ignore[type-var]


def _set_environment(service: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in {**environment(), **(service.get("environment") or {})}.items():
        if key.startswith("PDSERVE_"):
            monkeypatch.setenv(key, str(value))


def test_no_service_runs_without_what_protects_it(services: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    made = {f"/secrets/{READERS[name]}/{name}" for group in new_secrets(datetime.now(UTC)) for name in group.files}
    for name in ("router", *WORKERS):
        config = settings_of(services[name], monkeypatch)
        files = [config.cluster_secret_file, config.peer_ssl_certfile, config.peer_ssl_keyfile]
        files += [config.peer_ssl_ca_certs, config.redis_url.partition("?password_file=")[2]]
        if name == "router":
            files += [config.api_keys_file, config.state_url.partition("?password_file=")[2]]
            assert config.admin_port == 8002
        assert set(files) <= made, name
        assert config.peer_ssl_server_name == PEER_NAME
    for name in ("redis", "state"):
        redis = " ".join(services[name]["command"])
        assert f"requirepass $$(cat /secrets/{name}/{name}-password)" in redis
        assert "protected-mode" not in redis


def test_the_router_finds_the_store_of_responses_and_no_other_service_has_its_volume(
    services: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings_of(services["router"], monkeypatch)
    host, _, port = config.state_url.removeprefix("redis://").partition("?")[0].partition(":")
    assert (host, port) == ("state", "6379")
    assert host in services
    mounts = {
        name for name, each in services.items() if any(mount == "state:/data" for mount in each.get("volumes", ()))
    }
    assert mounts == {"state"}
    assert services["state"]["image"] == services["redis"]["image"]


def test_streams_can_be_resumed_until_a_lost_router_is_back(
    services: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    router = settings_of(services["router"], monkeypatch)
    assert router.resume_timeout_s > router.drain_timeout_s


def test_the_grace_period_covers_drain_and_close_and_the_routers_the_workers(
    services: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    grace = {name: seconds(services[name]["stop_grace_period"]) for name in ("router", *WORKERS)}
    for name in grace:
        assert grace[name] >= settings_of(services[name], monkeypatch).drain_timeout_s + CLOSE_S
    assert grace["router"] >= max(grace[name] for name in WORKERS)


def test_variables_reach_the_workers_of_their_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {
        "PDSERVE_MODEL_NAME": "Qwen3-8B",
        "PDSERVE_WORKER_ARGS": "--max-model-len 32768",
        "PDSERVE_PREFILL_ARGS": "--max-num-batched-tokens 8192",
        "PDSERVE_DECODE_ARGS": "--max-num-seqs=256 --kv-cache-memory 40GiB",
        "PDSERVE_DECODE_TP": "2",
        "PDSERVE_HANDOVER_MEMORY": "device",
    }
    services = load(BASE, GPU, variables=variables)["services"]
    prefill, decode = (settings_of(services[tier], monkeypatch) for tier in WORKERS)
    assert prefill.model == decode.model == "/models/Qwen3-8B"
    assert prefill.max_model_len == decode.max_model_len == 32768
    assert (prefill.max_prompt_tokens, decode.max_prompt_tokens) == (8192, 4096)
    assert (decode.max_decoding, prefill.kv_cache_memory, decode.kv_cache_memory) == (256, None, 40 << 30)
    assert (prefill.tensor_parallel_size, decode.tensor_parallel_size) == (1, 2)
    assert prefill.handover_memory == decode.handover_memory == "device"
    # On processors, too, and behind the flags of the file, which they replace.
    decode = settings_of(load(BASE, variables=variables)["services"]["decode"], monkeypatch)
    assert (decode.max_model_len, decode.kv_cache_memory) == (32768, 40 << 30)


def test_a_single_gpu_has_one_worker_which_also_prefills(monkeypatch: pytest.MonkeyPatch) -> None:
    services = load(BASE, GPU, ONE_GPU)["services"]
    on_gpus = {name: service.get("scale", 1) for name, service in services.items() if has_gpus(service)}
    assert on_gpus == {"prefill": 0, "decode": 1}
    assert settings_of(services["router"], monkeypatch).prefill_expected == 0


def test_the_kv_cache_has_what_is_left_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for stack, memory in (((BASE,), 1 << 30), ((BASE, GPU), None)):
        services = load(*stack)["services"]
        assert [settings_of(services[name], monkeypatch).kv_cache_memory for name in WORKERS] == [memory, memory]


@pytest.mark.parametrize("command", [StatusConfig, TraceConfig, DoctorConfig, DrainConfig, RebalanceConfig, RoleConfig])
def test_commands_in_the_container_of_a_router_find_the_cluster(command: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when one looks at a port without its paths, or calls workers without secret and certificates."""
    services = load(BASE)["services"]
    router = settings_of(services["router"], monkeypatch)
    settings = load_settings(command, command.__name__.removesuffix("Config").lower(), [])
    assert settings.base_url == f"http://127.0.0.1:{router.admin_port}"
    shared = {field.name for field in dataclasses.fields(command)} & {
        *("redis_url", "cluster_secret_file", "peer_ssl_certfile", "peer_ssl_keyfile"),
        *("peer_ssl_ca_certs", "peer_ssl_server_name"),
    }
    assert shared or command in (StatusConfig, TraceConfig)
    assert {name: getattr(settings, name) for name in shared} == {name: getattr(router, name) for name in shared}


def test_workers_on_processors_can_change_their_role(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those on GPUs cannot yet: a worker of both tiers refuses a GPU at its start."""
    for stack, module in (((BASE,), "worker_svc.{}"), ((BASE, GPU), "{}_svc")):
        services = load(*stack)["services"]
        started = [services[tier]["command"].split()[0] for tier in WORKERS]
        assert started == [module.format(tier) for tier in WORKERS]
    prefill, decode = (settings_of(load(BASE)["services"][tier], monkeypatch) for tier in WORKERS)
    assert prefill.stream_port == decode.stream_port == 50052


@pytest.mark.parametrize("stack", [(BASE,), (BASE, GPU)], ids="+".join)
def test_flags_and_variables_are_settings_of_their_service(
    stack: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    services = load(*stack)["services"]
    prefill = settings_of(services["prefill"], monkeypatch)
    decode = settings_of(services["decode"], monkeypatch)
    router = settings_of(services["router"], monkeypatch)
    assert isinstance(prefill, PrefillConfig if GPU in stack else DecodeConfig)
    assert isinstance(decode, DecodeConfig)
    assert isinstance(router, RouterConfig)
    assert router.host == "0.0.0.0"
    assert decode.host == prefill.host == "172.18.0.5"
    assert prefill.model == decode.model == "/models/smollm2-135m-instruct"
    assert router.model == (prefill.model,)
    assert prefill.claim_dir == decode.claim_dir == "/dev/shm/pdserve"
    assert prefill.device == decode.device == ("cuda" if GPU in stack else "cpu")
    assert (router.port, router.effective_grpc_port) == (8000, 8001)
    fetch = load_settings(FetchConfig, "fetch", services["model"]["command"])
    assert (fetch.model, fetch.to) == ("smollm2-135m-instruct", prefill.model)
