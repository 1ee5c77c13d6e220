"""The compose files: valid for Compose's schema, and by our own rules where a schema cannot see a mistake."""

from __future__ import annotations

import dataclasses
import re
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from decode_svc.config import DecodeConfig
from pdserve.base.config import load as load_settings
from pdserve.cli.cluster_secrets.certificates import PEER_NAME
from pdserve.cli.cluster_secrets.contents import METRICS_KEY, READERS, new_secrets
from pdserve.cli.doctor import DoctorConfig
from pdserve.cli.drain import DrainConfig
from pdserve.cli.fetch import FetchConfig
from pdserve.cli.rebalance import RebalanceConfig
from pdserve.cli.role import RoleConfig
from pdserve.cli.secrets import SecretsConfig
from pdserve.cli.status import StatusConfig
from pdserve.cli.trace import TraceConfig
from prefill_svc.config import PrefillConfig
from router_svc.config import RouterConfig
from tests.arch.documents import ROOT
from tests.deploy.compose_files import BASE, COMPOSE, GPU, MONITORING, ONE_GPU, load, seconds
from tests.deploy.dockerfile import environment
from tests.support.tools import tool

FILES = (BASE, GPU, ONE_GPU, MONITORING)
STACKS = ((BASE,), (BASE, GPU), (BASE, GPU, ONE_GPU), (BASE, MONITORING), (BASE, GPU, MONITORING))
WORKERS = ("prefill", "decode")
#: What a worker needs after its drain to close its sockets.
CLOSE_S = 20


@pytest.fixture(params=STACKS, ids="+".join)
def services(request: pytest.FixtureRequest) -> dict[str, Any]:
    found: dict[str, Any] = load(*request.param)["services"]
    return found


def test_every_file_follows_the_compose_specification() -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    checked = subprocess.run(
        [*command, *(str(COMPOSE / name) for name in FILES)], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout


def test_keys_that_docker_compose_1_29_does_not_know_are_not_used() -> None:
    """Extension fields apart, its schema has only these at the top; `name`, `gpus` and `!override` came later."""
    for name in FILES:
        assert {key for key in load(name) if not key.startswith("x-")} <= {"services", "volumes"}
        text = (COMPOSE / name).read_text(encoding="utf-8")
        assert "!override" not in text
        assert not any("gpus" in service for service in load(name)["services"].values())
        # It has no defaults within defaults.
        assert not re.search(r"\$\{[^}]*\$\{", text)


def test_tiers_can_be_scaled(services: dict[str, Any]) -> None:
    for service in services.values():
        assert "container_name" not in service
        assert "hostname" not in service
    for name in (*WORKERS, "pause", "redis", "state", "model", "secrets"):
        assert "ports" not in services[name], name


def test_ports_are_published_on_loopback_by_default(services: dict[str, Any]) -> None:
    published = [port for service in services.values() for port in service.get("ports", [])]
    assert published
    assert all(port.startswith("127.0.0.1:") for port in published)


def test_workers_share_pid_and_ipc_namespace_of_a_service_that_does_nothing_else(services: dict[str, Any]) -> None:
    for name in WORKERS:
        worker = services[name]
        assert (worker["pid"], worker["ipc"]) == ("service:pause", "service:pause")
        assert worker["cap_add"] == ["SYS_PTRACE"]
        # CMA needs equal credentials.
        assert worker["user"] == services["decode"]["user"]
        assert worker["cap_drop"] == ["ALL"]
    pause = services["pause"]
    assert pause["init"] is True
    assert pause["ipc"] == "shareable"
    assert "pid" not in pause


def test_the_owner_of_the_namespaces_waits_for_nothing_when_the_engine_starts(services: dict[str, Any]) -> None:
    """An engine that starts tries each container once, in no order: a worker that comes first stays down."""
    pause = services["pause"]
    assert pause["network_mode"] == "none"
    assert "volumes" not in pause
    for name in ("pause", *WORKERS):
        assert services[name]["restart"] == "unless-stopped"


def test_one_service_builds_an_image_and_the_others_wait_for_it(services: dict[str, Any]) -> None:
    """Compose builds in parallel, and two builds that export one tag fail with "already exists" on Engine 29.

    docker-compose 1.29 goes through the services by their dependencies, and would try to pull what is not built yet.
    """
    builders = {service["image"]: name for name, service in services.items() if "build" in service}
    assert [name for name, service in services.items() if "build" in service] == list(builders.values())
    for name, service in services.items():
        builder = builders.get(service["image"], name)
        assert builder == name or builder in service["depends_on"], name
        assert service["image"] in builders or not service["image"].startswith("pdserve:"), name


def test_nothing_waits_for_a_service_that_loads_a_model(services: dict[str, Any]) -> None:
    for name in ("router", *WORKERS):
        needed = services[name]["depends_on"]
        assert needed.pop("state", None) == ({"condition": "service_started"} if name == "router" else None)
        assert set(needed) == {"redis", "model", "secrets"}
    for name in ("redis", "state"):
        assert services[name]["depends_on"] == {"secrets": {"condition": "service_completed_successfully"}}
    assert services["model"]["restart"] == services["secrets"]["restart"] == "no"


def _has_gpus(service: dict[str, Any]) -> bool:
    """Whether the NVIDIA Container Toolkit prepares the container: its hook fails with a root that is read-only."""
    return bool(service.get("deploy", {}).get("resources", {}).get("reservations", {}).get("devices"))


def test_containers_have_no_rights_beyond_their_work(services: dict[str, Any]) -> None:
    for name, service in services.items():
        assert service["read_only"] is not _has_gpus(service), name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["logging"]["options"]["max-size"], name
        assert service.get("cap_add", []) == (["SYS_PTRACE"] if name in WORKERS else []), name
        assert not service.get("privileged"), name
        assert service.get("network_mode") != "host", name


def test_models_are_written_by_their_service_alone(services: dict[str, Any]) -> None:
    assert services["model"]["volumes"] == ["models:/models"]
    for name in ("router", *WORKERS):
        assert "models:/models:ro" in services[name]["volumes"]


def test_compiled_kernels_are_loaded_from_a_volume_that_allows_it(services: dict[str, Any]) -> None:
    """Docker mounts every tmpfs noexec, and a library cannot be loaded from there."""
    cache = Path(environment()["TRITON_CACHE_DIR"])
    for name in WORKERS:
        temporary = [Path(mount.partition(":")[0]) for mount in services[name]["tmpfs"]]
        volumes = dict(mount.split(":")[:2] for mount in services[name]["volumes"])
        assert not any(cache.is_relative_to(path) for path in temporary), name
        assert cache.is_relative_to(volumes["cache"]), name


def test_secrets_are_written_by_their_service_alone(services: dict[str, Any]) -> None:
    readers = sorted(set(READERS.values()))
    assert services["secrets"]["volumes"] == [f"secrets-{reader}:/secrets/{reader}" for reader in readers]
    assert services["secrets"]["network_mode"] == "none"
    settings = load_settings(SecretsConfig, "secrets", services["secrets"]["command"])
    assert (settings.to, settings.by_reader) == ("/secrets", True)


def test_a_service_reads_the_secrets_that_it_needs_and_no_others() -> None:
    """Fails when a volume is mounted in one more service, or without `:ro`."""
    needed = {
        "redis": ["redis"],
        "state": ["state"],
        "router": ["peers", "redis", "router", "state"],
        "prefill": ["peers", "redis"],
        "decode": ["peers", "redis"],
        "prometheus": ["metrics"],
    }
    for name, service in load(BASE, MONITORING)["services"].items():
        if name != "secrets":
            mounts = [volume for volume in service.get("volumes", []) if volume.startswith("secrets")]
            assert mounts == [f"secrets-{reader}:/secrets/{reader}:ro" for reader in needed.get(name, [])], name


def test_the_admin_port_is_published_on_loopback_whatever_else_is() -> None:
    for stack in STACKS:
        ports = load(*stack, variables={"PDSERVE_PUBLISH": "0.0.0.0"})["services"]["router"]["ports"]
        assert [port for port in ports if port.endswith(":8002")] == ["127.0.0.1:8002:8002"]


def test_no_service_runs_without_what_protects_it(services: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    made = {f"/secrets/{READERS[name]}/{name}" for group in new_secrets(datetime.now(UTC)) for name in group.files}
    for name in ("router", *WORKERS):
        config = _settings(services[name], monkeypatch)
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
    config = _settings(services["router"], monkeypatch)
    host, _, port = config.state_url.removeprefix("redis://").partition("?")[0].partition(":")
    assert (host, port) == ("state", "6379")
    assert host in services
    mounts = {
        name for name, each in services.items() if any(mount == "state:/data" for mount in each.get("volumes", ()))
    }
    assert mounts == {"state"}
    assert services["state"]["image"] == services["redis"]["image"]


def test_what_services_do_not_write_again_is_on_a_volume(services: dict[str, Any]) -> None:
    """Stored responses, and the usage and budgets of keys."""
    for name in ("redis", "state"):
        service = services[name]
        assert f"{name}:/data" in service["volumes"]
        assert "/data" not in service["tmpfs"]
        assert "--dir /data" in service["command"][2]
        # The volume begins as this user's, whichever one the others have.
        assert service["user"] == "999:0"


def test_streams_can_be_resumed_until_a_lost_router_is_back(
    services: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    router = _settings(services["router"], monkeypatch)
    assert router.resume_timeout_s > router.drain_timeout_s


def test_the_grace_period_covers_drain_and_close_and_the_routers_the_workers(
    services: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    grace = {name: seconds(services[name]["stop_grace_period"]) for name in ("router", *WORKERS)}
    for name in grace:
        assert grace[name] >= _settings(services[name], monkeypatch).drain_timeout_s + CLOSE_S
    assert grace["router"] >= max(grace[name] for name in WORKERS)


def test_every_worker_sees_all_gpus() -> None:
    services = load(BASE, GPU)["services"]
    assert {name for name, service in services.items() if _has_gpus(service)} == set(WORKERS)
    for name in WORKERS:
        [devices] = services[name]["deploy"]["resources"]["reservations"]["devices"]
        # Both at once are refused only by the engine, and one without capabilities likewise.
        assert ("count" in devices) != ("device_ids" in devices)
        assert (devices["driver"], devices["capabilities"], devices["count"]) == ("nvidia", ["gpu"], "all")
        assert services[name]["ulimits"]["memlock"] == {"soft": -1, "hard": -1}
    assert services["pause"]["shm_size"] == "8gb"


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
    prefill, decode = (_settings(services[tier], monkeypatch) for tier in WORKERS)
    assert prefill.model == decode.model == "/models/Qwen3-8B"
    assert prefill.max_model_len == decode.max_model_len == 32768
    assert (prefill.max_num_batched_tokens, decode.max_num_batched_tokens) == (8192, 512)
    assert (decode.max_num_seqs, prefill.kv_cache_memory, decode.kv_cache_memory) == (256, None, 40 << 30)
    assert (prefill.tensor_parallel_size, decode.tensor_parallel_size) == (1, 2)
    assert prefill.handover_memory == decode.handover_memory == "device"
    # On processors, too, and behind the flags of the file, which they replace.
    decode = _settings(load(BASE, variables=variables)["services"]["decode"], monkeypatch)
    assert (decode.max_model_len, decode.kv_cache_memory) == (32768, 40 << 30)


def test_a_single_gpu_has_one_worker_which_also_prefills(monkeypatch: pytest.MonkeyPatch) -> None:
    services = load(BASE, GPU, ONE_GPU)["services"]
    on_gpus = {name: service.get("scale", 1) for name, service in services.items() if _has_gpus(service)}
    assert on_gpus == {"prefill": 0, "decode": 1}
    assert _settings(services["router"], monkeypatch).prefill_expected == 0


def test_the_kv_cache_has_what_is_left_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for stack, memory in (((BASE,), 1 << 30), ((BASE, GPU), None)):
        services = load(*stack)["services"]
        assert [_settings(services[name], monkeypatch).kv_cache_memory for name in WORKERS] == [memory, memory]


def test_images_of_others_are_pinned_and_can_be_replaced() -> None:
    for name in FILES:
        text = (COMPOSE / name).read_text(encoding="utf-8")
        for image in re.findall(r"^ +image: (.+)$", text, re.MULTILINE):
            match = re.fullmatch(r"\$\{\w+_IMAGE:-([^:}]+):([^}]+)\}", image)
            assert match, image
            assert match[1] == "pdserve" or re.search(r"\d+\.\d+", match[2]), image


def _settings(service: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Any:
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


@pytest.mark.parametrize("command", [StatusConfig, TraceConfig, DoctorConfig, DrainConfig, RebalanceConfig, RoleConfig])
def test_commands_in_the_container_of_a_router_find_the_cluster(command: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when one looks at a port without its paths, or calls workers without secret and certificates."""
    services = load(BASE)["services"]
    router = _settings(services["router"], monkeypatch)
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
    prefill, decode = (_settings(load(BASE)["services"][tier], monkeypatch) for tier in WORKERS)
    assert prefill.stream_port == decode.stream_port == 50052


@pytest.mark.parametrize("stack", [(BASE,), (BASE, GPU)], ids="+".join)
def test_flags_and_variables_are_settings_of_their_service(
    stack: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    services = load(*stack)["services"]
    prefill = _settings(services["prefill"], monkeypatch)
    decode = _settings(services["decode"], monkeypatch)
    router = _settings(services["router"], monkeypatch)
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


def _yaml(name: str) -> Any:
    return yaml.safe_load((COMPOSE / "monitoring" / name).read_text(encoding="utf-8"))


def test_prometheus_scrapes_every_container_of_every_service_of_ours() -> None:
    jobs = _yaml("prometheus.yaml")["scrape_configs"]
    targets = {(job["dns_sd_configs"][0]["names"][0], job["dns_sd_configs"][0]["port"]) for job in jobs}
    assert targets == {("router", 8002), ("prefill", 9100), ("decode", 9100)}


def test_prometheus_has_a_key_for_metrics_and_may_read_it() -> None:
    [router] = [job for job in _yaml("prometheus.yaml")["scrape_configs"] if job["job_name"] == "pdserve-router"]
    assert router["authorization"] == {"credentials_file": f"/secrets/metrics/{METRICS_KEY}"}
    prometheus = load(BASE, MONITORING)["services"]["prometheus"]
    assert prometheus["user"].endswith(":0")
    assert "secrets-metrics:/secrets/metrics:ro" in prometheus["volumes"]


def test_addresses_in_the_monitoring_files_are_services_of_the_stack() -> None:
    services = load(BASE, MONITORING)["services"]
    names = {"otel-collector.yaml": ["jaeger"], "grafana/datasources.yaml": ["prometheus", "jaeger"]}
    for file, hosts in names.items():
        text = (COMPOSE / "monitoring" / file).read_text(encoding="utf-8")
        found = re.findall(r"(?:http://|endpoint: )([a-z-]+):\d+", text)
        assert found == hosts
        assert set(found) <= set(services)


def test_rules_that_prometheus_loads_are_mounted() -> None:
    names = {Path(path).name for path in _yaml("prometheus.yaml")["rule_files"]}
    assert names <= {path.name for path in (ROOT / "k8s/monitoring/rules").glob("*.yaml")}


def test_services_send_their_traces_to_the_collector() -> None:
    services = load(BASE, GPU, MONITORING)["services"]
    ports = re.findall(r"endpoint: .0\.0\.0\.0:(\d+)", (COMPOSE / "monitoring/otel-collector.yaml").read_text())
    for name in ("router", *WORKERS):
        endpoint = services[name]["environment"]["OTEL_EXPORTER_OTLP_ENDPOINT"]
        assert endpoint == "http://otel-collector:4318"
        assert endpoint.rpartition(":")[2] in ports


def test_the_start_page_of_grafana_is_a_dashboard_of_ours() -> None:
    path = load(BASE, MONITORING)["services"]["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert (ROOT / "k8s/monitoring/dashboards" / Path(path).name).exists()


@pytest.mark.deploy
def test_prometheus_takes_its_configuration(tmp_path: Path) -> None:
    promtool = tool("promtool")
    text = (COMPOSE / "monitoring/prometheus.yaml").read_text(encoding="utf-8")
    config = tmp_path / "prometheus.yaml"
    text = text.replace("/etc/prometheus/rules", str(ROOT / "k8s/monitoring/rules"))
    (tmp_path / METRICS_KEY).touch()
    config.write_text(text.replace("/secrets/metrics/", f"{tmp_path}/"), encoding="utf-8")
    checked = subprocess.run([promtool, "check", "config", config], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr


def test_mounted_files_exist() -> None:
    for name, service in load(BASE, MONITORING)["services"].items():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (COMPOSE / source).exists(), f"{name}: {source}"


def test_the_project_has_a_name_of_its_own() -> None:
    assert "COMPOSE_PROJECT_NAME=pdserve" in Path(COMPOSE / ".env").read_text(encoding="utf-8").splitlines()
