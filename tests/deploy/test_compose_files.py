"""The compose files: valid for Compose's schema, and by our own rules where a schema cannot see a mistake."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from pdserve.base.config import load as load_settings
from pdserve.cli.cluster_secrets.contents import METRICS_KEY, READERS
from pdserve.cli.secrets import SecretsConfig
from tests.arch.documents import ROOT
from tests.deploy.compose_files import BASE, COMPOSE, GPU, MONITORING, ONE_GPU, STACKS, WORKERS, has_gpus, load
from tests.deploy.dockerfile import environment
from tests.support.tools import tool

FILES = (BASE, GPU, ONE_GPU, MONITORING)


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
        # Who copies from another's memory needs equal credentials.
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


def test_containers_have_no_rights_beyond_their_work(services: dict[str, Any]) -> None:
    for name, service in services.items():
        assert service["read_only"] is not has_gpus(service), name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["logging"]["options"]["max-size"], name
        # CPU workers copy from shared memory. Those on GPUs may have to read the memory of processes.
        assert service.get("cap_add", []) == (["SYS_PTRACE"] if has_gpus(service) else []), name
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


def test_what_services_do_not_write_again_is_on_a_volume(services: dict[str, Any]) -> None:
    """Stored responses, and the usage and budgets of keys."""
    for name in ("redis", "state"):
        service = services[name]
        assert f"{name}:/data" in service["volumes"]
        assert "/data" not in service["tmpfs"]
        assert "--dir /data" in service["command"][2]
        # The volume begins as this user's, whichever one the others have.
        assert service["user"] == "999:0"


def test_every_worker_sees_all_gpus() -> None:
    services = load(BASE, GPU)["services"]
    assert {name for name, service in services.items() if has_gpus(service)} == set(WORKERS)
    for name in WORKERS:
        [devices] = services[name]["deploy"]["resources"]["reservations"]["devices"]
        # Both at once are refused only by the engine, and one without capabilities likewise.
        assert ("count" in devices) != ("device_ids" in devices)
        assert (devices["driver"], devices["capabilities"], devices["count"]) == ("nvidia", ["gpu"], "all")
        assert services[name]["ulimits"]["memlock"] == {"soft": -1, "hard": -1}
    assert services["pause"]["shm_size"] == "8gb"


def test_images_of_others_are_pinned_and_can_be_replaced() -> None:
    for name in FILES:
        text = (COMPOSE / name).read_text(encoding="utf-8")
        for image in re.findall(r"^ +image: (.+)$", text, re.MULTILINE):
            match = re.fullmatch(r"\$\{\w+_IMAGE:-([^:}]+):([^}]+)\}", image)
            assert match, image
            assert match[1] == "pdserve" or re.search(r"\d+\.\d+", match[2]), image


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
