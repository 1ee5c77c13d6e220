"""Pods of every overlay: labels, settings, probes, times to drain, resources, and the Pod Security level restricted."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from prometheus_client import CollectorRegistry

from pdserve import __version__
from pdserve.cli.__main__ import COMMANDS
from pdserve.net.admin import Health, health_routes
from router_svc.config import RouterConfig
from tests.deploy.manifests import (
    MONITORS,
    NAMES,
    WORKERS,
    Object,
    Service,
    Workload,
    documents,
    module_of,
    selects,
    services,
    title,
    workloads,
)
from tests.deploy.render import ROOT

#: What the manifests consist of: nothing that needs rights beyond a namespace, the namespace itself apart.
ALLOWED_KINDS = {
    *("ConfigMap", "Deployment", "Job", "PersistentVolumeClaim", "PodDisruptionBudget", "Service", "StatefulSet"),
    *("DaemonSet", "HorizontalPodAutoscaler", "Namespace", "NetworkPolicy", "Role", "RoleBinding", "ServiceAccount"),
    *(
        "Certificate",
        "DisaggregatedSet",
        "HTTPRoute",
        "InferencePool",
        "Issuer",
        "PodMonitor",
        "PrometheusRule",
        "ResourceClaimTemplate",
        "ScaledObject",
    ),
}
TIERS = ("router", "prefill", "decode", "pair")
PRE_STOP_S, TEARDOWN_S = 15, 15
MAX_CAPABILITIES = {"rdma": {"IPC_LOCK"}}
VOLUMES = {"configMap", "emptyDir", "image", "persistentVolumeClaim", "secret"}
#: The overlay with models on the disks of nodes, which one pod of each node writes as root.
MAX_VOLUMES = {"models-per-node": VOLUMES | {"hostPath"}}
ROOT_PODS = {"models-per-node: DaemonSet/pdserve-models"}

ALL_WORKLOADS = [workload for name in NAMES for workload in workloads(name)]
ALL_SERVICES = [service for name in NAMES for service in services(name)]


def workload_id(workload: Workload) -> str:
    return workload.title


def service_id(service: Service) -> str:
    return service.title


def test_the_base_has_all_services_and_nothing_but_the_listed_kinds() -> None:
    assert Counter(service.module for service in services("base")) == dict.fromkeys(
        ("router_svc", "prefill_svc", "decode_svc"), 1
    )
    base = {document["kind"] for document in documents("base")}
    # No group of a CRD: those of Kubernetes itself have no dot, or end in k8s.io.
    groups = {document["apiVersion"].rpartition("/")[0] for document in documents("base")}
    assert {group for group in groups if "." in group} == {"networking.k8s.io", "rbac.authorization.k8s.io"}
    assert "Namespace" not in base
    assert {document["kind"] for name in NAMES for document in documents(name)} <= ALLOWED_KINDS


def test_objects_have_the_common_labels_and_distinct_names() -> None:
    for name in NAMES:
        titles = [title(document) for document in documents(name)]
        assert len(titles) == len(set(titles)), name
        for document in documents(name):
            labels = document["metadata"].get("labels", {})
            assert labels.get("app.kubernetes.io/part-of") == "pdserve", f"{name}: {title(document)}"


@pytest.mark.parametrize("workload", ALL_WORKLOADS, ids=workload_id)
def test_pods_are_labelled_selected_and_spread(workload: Workload) -> None:
    labels = workload.labels
    assert {"app.kubernetes.io/name", "app.kubernetes.io/component", "app.kubernetes.io/part-of"} <= labels.keys()
    assert (workload.selector or {}).items() <= labels.items()
    if workload.component not in TIERS:
        return
    assert labels["pdserve/tier"] == workload.component
    [spread] = workload.spec["topologySpreadConstraints"]
    assert selects(spread["labelSelector"], labels)
    assert spread["whenUnsatisfiable"] == "ScheduleAnyway"


@pytest.mark.parametrize("name", sorted(set(NAMES) - MONITORS))
def test_every_tier_has_one_disruption_budget_and_services_find_their_pods(name: str) -> None:
    budgets = [each for each in documents(name) if each["kind"] == "PodDisruptionBudget"]
    for workload in workloads(name):
        matching = [budget for budget in budgets if selects(budget["spec"]["selector"], workload.labels)]
        assert len(matching) == (workload.component in TIERS), workload.title
    assert all(budget["spec"]["maxUnavailable"] == 1 for budget in budgets)
    for service in (each for each in documents(name) if each["kind"] == "Service"):
        [workload] = [
            each for each in workloads(name) if selects({"matchLabels": service["spec"]["selector"]}, each.labels)
        ]
        known = {port["name"] for container in workload.containers for port in container["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= known
        numbers = {port["containerPort"] for container in workload.containers for port in container["ports"]}
        assert {port["port"] for port in service["spec"]["ports"]} <= numbers


def has_gpu(container: Object) -> bool:
    return "nvidia.com/gpu" in container["resources"]["limits"] or "claims" in container["resources"]


@pytest.mark.parametrize("workload", ALL_WORKLOADS, ids=workload_id)
def test_pods_meet_the_restricted_level_and_more(workload: Workload) -> None:
    spec = workload.spec
    assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
    # tests/deploy/test_kubernetes_secrets.py says which pod alone has a token.
    assert isinstance(spec["automountServiceAccountToken"], bool)
    # Otherwise Kubernetes adds variables for each Service of the namespace.
    assert spec["enableServiceLinks"] is False
    pod = spec["securityContext"]
    if workload.title not in ROOT_PODS:
        assert pod["runAsNonRoot"] is True
        assert pod["runAsUser"] > 0
    assert pod["seccompProfile"] == {"type": "RuntimeDefault"}
    for volume in spec.get("volumes", ()):
        assert volume.keys() - {"name"} <= MAX_VOLUMES.get(workload.render, VOLUMES)
    for container in workload.all_containers:
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        # The NVIDIA Container Toolkit's hooks write into the root file system of a container with a GPU.
        assert context["readOnlyRootFilesystem"] is not has_gpu(container)
        assert context["capabilities"]["drop"] == ["ALL"]
        assert set(context["capabilities"].get("add", ())) <= MAX_CAPABILITIES.get(workload.render, set())
        assert not {"privileged", "runAsUser", "procMount"} & context.keys()
        assert "hostPort" not in {key for port in container.get("ports", ()) for key in port}


def test_a_container_of_the_image_for_gpus_that_needs_none_gets_none() -> None:
    """The image asks for all GPUs of its node, and the hook that gives them fails on a read-only root."""
    image = (ROOT / "compose/Dockerfile").read_text(encoding="utf-8")
    assert "NVIDIA_VISIBLE_DEVICES=all" in image
    found: dict[str, list[str]] = {name: [] for name in ("gpu", "rdma", "same-pod-gpu")}
    for workload in (each for name in found for each in workloads(name)):
        for container in workload.all_containers:
            if container["image"].startswith("pdserve-cuda:") and not has_gpu(container):
                assert {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"} in container["env"], workload.title
                found[workload.render].append(container["name"])
    assert {name: sorted(containers) for name, containers in found.items()} == {
        "gpu": ["fetch", "wait-for-model", "wait-for-model"],
        "rdma": ["fetch", "wait-for-model", "wait-for-model"],
        "same-pod-gpu": ["fetch", "wait-for-model"],
    }


@pytest.mark.parametrize("workload", ALL_WORKLOADS, ids=workload_id)
def test_containers_have_pinned_images_memory_limits_and_complete_ports(workload: Workload) -> None:
    for container in workload.all_containers:
        image, _, tag = container["image"].rpartition(":")
        assert image, f"{container['image']} has no tag"
        assert tag != "latest"
        if image.startswith("pdserve"):
            assert tag == __version__
        resources = container["resources"]
        assert resources["requests"]["memory"] == resources["limits"]["memory"]
        assert "cpu" in resources["requests"]
        # Keys of lists, with which server-side apply merges.
        assert all("protocol" in port for port in container.get("ports", ()))
        for key, field in (("env", "name"), ("volumeMounts", "mountPath")):
            values = [each[field] for each in container.get(key, ())]
            assert len(values) == len(set(values))
    used = {mount["name"] for container in workload.all_containers for mount in container.get("volumeMounts", ())}
    assert used == {volume["name"] for volume in workload.spec.get("volumes", ())}


def test_workers_have_one_user_so_that_they_may_read_each_others_memory() -> None:
    users = {
        (service.workload.spec["securityContext"]["runAsUser"], service.workload.spec["securityContext"]["runAsGroup"])
        for service in ALL_SERVICES
    }
    assert users == {(1000, 0)}


@pytest.mark.parametrize("service", ALL_SERVICES, ids=service_id)
def test_a_service_gets_settings_that_it_accepts_and_listens_on_its_containers_ports(service: Service) -> None:
    config = service.config
    if isinstance(config, RouterConfig):
        assert service.ports == {"http": config.port, "grpc": config.effective_grpc_port, "admin": config.admin_port}
        assert config.host == "0.0.0.0"
        # The code's defaults, which documents and clients use.
        assert (config.port, config.effective_grpc_port) == (RouterConfig(model=(), redis_url="").port, 8001)
        return
    numbers = {"grpc": config.grpc_port, "http": config.http_port}
    if "decode_svc" in service.roles:
        numbers["stream"] = config.stream_port
    assert {name.rpartition("-")[2]: port for name, port in service.ports.items()} == numbers
    assert config.host == "10.0.0.7"
    assert config.worker_id.startswith("pod-0")
    assert config.threads == int(service.container["resources"]["limits"]["cpu"])


def test_workers_change_their_role_where_they_can() -> None:
    """`worker_svc.service.RolesService` refuses the others, and `pdserve role` refuses workers with one role."""
    for service in ALL_SERVICES:
        if not isinstance(config := service.config, RouterConfig):
            can = (config.device, config.tensor_parallel_size, config.transport) == ("cpu", 1, "ucx")
            # A pair has one worker of each tier.
            can = can and service.workload.component != "pair"
            assert service.roles == (set(WORKERS) if can else {service.module}), service.title


@pytest.mark.parametrize("name", sorted(set(NAMES) - MONITORS))
def test_services_of_one_cluster_agree(name: str) -> None:
    found = services(name)
    assert len({service.model for service in found}) == 1
    configs = [service.config for service in found]
    for setting in ("redis_url", "drain_timeout_s"):
        assert len({getattr(config, setting) for config in configs}) == 1, setting
    workers = [config for config in configs if not isinstance(config, RouterConfig)]
    for setting in ("model", "dtype", "block_size", "transport", "quantization", "kv_cache_dtype", "handover_memory"):
        assert len({getattr(config, setting) for config in workers}) == 1, setting
    # Which GPU, where they share a pod, is each worker's own.
    assert len({config.device.partition(":")[0] for config in workers}) == 1


@pytest.mark.parametrize("service", ALL_SERVICES, ids=service_id)
def test_probes_see_hangs_and_leave_time_to_load(service: Service) -> None:
    async def paths() -> set[str]:
        return {route.path for route in health_routes(Health(), CollectorRegistry())}

    known = asyncio.run(paths())
    container = service.container
    startup, live, ready = (container[f"{kind}Probe"] for kind in ("startup", "liveness", "readiness"))
    for probe in (startup, live, ready):
        assert probe["httpGet"]["path"] in known
        assert probe["httpGet"]["port"] in service.ports
        # A delay is no substitute for a startup probe: loading takes longer than any guess.
        assert "initialDelaySeconds" not in probe
    assert (live["httpGet"]["path"], ready["httpGet"]["path"]) == ("/livez", "/readyz")
    is_router = isinstance(service.config, RouterConfig)
    # A router's readiness needs workers, which may take any time.
    assert startup["httpGet"]["path"] == ("/livez" if is_router else "/readyz")
    budget_s = startup["periodSeconds"] * startup["failureThreshold"]
    on_gpu = not is_router and service.config.device.startswith("cuda")
    assert budget_s >= (120 if is_router else 3600 if on_gpu else 600)
    assert live["periodSeconds"] * live["failureThreshold"] >= 30
    if not is_router:
        # Minutes, because kernels may be compiled at the first traffic; less than routers wait for a token.
        assert 120 <= service.config.stall_timeout_s <= RouterConfig(model=(), redis_url="").token_timeout_s
        # preStop runs here, too, and would wait for nothing.
        assert live["terminationGracePeriodSeconds"] < PRE_STOP_S


@pytest.mark.parametrize("service", ALL_SERVICES, ids=service_id)
def test_the_grace_period_has_time_for_all_of_draining(service: Service) -> None:
    assert service.container["lifecycle"] == {"preStop": {"sleep": {"seconds": PRE_STOP_S}}}
    grace_s = service.workload.spec["terminationGracePeriodSeconds"]
    assert grace_s == PRE_STOP_S + service.config.drain_timeout_s + TEARDOWN_S
    workers = [each for each in services(service.workload.render) if not isinstance(each.config, RouterConfig)]
    if isinstance(service.config, RouterConfig):
        # Longer than the endpoints of the Service take to name another router.
        assert service.config.resume_timeout_s >= 60
        assert grace_s >= max(each.workload.spec["terminationGracePeriodSeconds"] for each in workers)


def test_rollouts_keep_routers_and_all_workers_but_one() -> None:
    for document in documents("base"):
        spec = document.get("spec", {})
        if title(document) == "Deployment/pdserve-router":
            assert spec["replicas"] >= 2
            assert spec["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
        if document["kind"] == "StatefulSet":
            assert spec["podManagementPolicy"] == "Parallel"
            assert spec["updateStrategy"] == {"type": "RollingUpdate"}
        if title(document) == "StatefulSet/pdserve-decode":
            assert spec["replicas"] >= 2


def test_other_containers_run_commands_of_ours_or_of_their_image() -> None:
    for workload in ALL_WORKLOADS:
        for container in workload.all_containers:
            command = container.get("command", [])
            if command[:1] == ["pdserve"]:
                assert command[1] in COMMANDS
            elif command == ["sleep", "infinity"]:
                assert "DaemonSet" in workload.title
            elif command[:1] == ["sh"]:
                words = command[2].split()
                assert "pdserve" not in words or words[words.index("pdserve") + 1] in COMMANDS
                assert ("redis-server" in words) == (workload.component in ("redis", "state"))
            else:
                assert module_of(container) is not None


def test_jobs_end_and_go_away() -> None:
    for name in NAMES:
        for job in (each for each in documents(name) if each["kind"] == "Job"):
            assert job["spec"]["ttlSecondsAfterFinished"] > 0
            assert job["spec"]["backoffLimit"] < 10
