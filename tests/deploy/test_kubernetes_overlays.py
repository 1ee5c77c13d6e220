"""What each overlay changes, and that what is written twice is the same."""

from __future__ import annotations

import itertools
from typing import Any

import yaml

from kvtransfer.transport.path import excluded_paths
from tests.arch.documents import code_blocks, section
from tests.deploy.manifests import (
    LOADER,
    Workload,
    config_map,
    documents,
    environment,
    of_kind,
    selects,
    services,
    title,
    workloads,
)
from tests.deploy.render import K8S, MONITORING, RENDERED
from tests.deploy.secret_policy import OWN_REDIS, OWN_STATE, PASSWORD_FILE, STATE_PASSWORD_FILE


def tier(name: str, component: str) -> Workload:
    [workload] = [each for each in workloads(name) if each.component == component]
    return workload


def test_a_disaggregated_set_has_the_pods_of_the_stateful_sets() -> None:
    for component in ("prefill", "decode"):
        role, stateful = tier("disaggregatedset", component), tier("base", component)
        assert role.spec == stateful.spec
        assert role.labels == stateful.labels
        assert role.replicas == stateful.replicas
    assert [title(each) for each in of_kind("disaggregatedset", "StatefulSet")] == ["StatefulSet/pdserve-state"]
    [each] = of_kind("disaggregatedset", "DisaggregatedSet")
    surges = {
        role["name"]: role["spec"]["rolloutStrategy"]["rollingUpdateConfiguration"] for role in each["spec"]["roles"]
    }
    assert surges == {
        "prefill": {"maxSurge": 0, "maxUnavailable": 1},
        "decode": {"maxSurge": 1, "maxUnavailable": 0},
    }


def without(container: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in container.items() if key not in keys}


def test_a_pair_shares_processes_and_has_the_containers_of_both_tiers() -> None:
    pair = tier("same-pod", "pair")
    assert pair.spec["shareProcessNamespace"] is True
    ports = [port["containerPort"] for container in pair.containers for port in container["ports"]]
    names = [port["name"] for container in pair.containers for port in container["ports"]]
    assert len(ports) == len(set(ports)) == len(names) == len(set(names)) == 5
    workers = [service.config for service in services("same-pod") if service.module != "router_svc"]
    assert {config.worker_id for config in workers} == {"pod-0-prefill", "pod-0-decode"}
    for container in pair.containers:
        [alone] = tier("base", container["name"]).containers
        specific = ("args", "command", "env", "name", "ports", "startupProbe", "livenessProbe", "readinessProbe")
        assert without(container, *specific) == without(alone, *specific)
        for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert without(container[kind], "httpGet") == without(alone[kind], "httpGet")
        # Pods cannot copy from each other's memory, workers of one pod can.
        variables, base_variables = (sorted(each["name"] for each in other["env"]) for other in (container, alone))
        assert variables == [name for name in base_variables if name != "UCX_TLS"]
        assert variables != base_variables
    assert not {"StatefulSet/pdserve-prefill", "StatefulSet/pdserve-decode"} & set(map(title, documents("same-pod")))


def test_a_pair_on_gpus_shares_them_so_that_kv_may_take_nvlink() -> None:
    """CUDA IPC needs that each process sees both GPUs and the other process; UCX_TLS must not exclude it."""
    pair = tier("same-pod-gpu", "pair")
    assert pair.spec["shareProcessNamespace"] is True
    [template] = of_kind("same-pod-gpu", "ResourceClaimTemplate")
    [claim] = pair.spec["resourceClaims"]
    assert claim["resourceClaimTemplateName"] == template["metadata"]["name"]
    [request] = template["spec"]["spec"]["devices"]["requests"]
    workers = [service for service in services("same-pod-gpu") if service.module != "router_svc"]
    assert request["exactly"]["count"] == len(workers)
    assert {service.config.device for service in workers} == {f"cuda:{number}" for number in range(len(workers))}
    for service in workers:
        assert service.container["resources"]["claims"] == [{"name": claim["name"]}]
        assert "nvidia.com/gpu" not in service.container["resources"]["limits"]
        assert service.config.handover_memory == "device"
        variables = environment("same-pod-gpu", service.container)
        assert excluded_paths(variables.get("UCX_TLS")) == frozenset()


def test_the_pod_of_a_worker_is_written_once() -> None:
    files = [path for path in K8S.rglob("*.yaml") if not (path.is_relative_to(RENDERED) or path.is_symlink())]
    texts = {str(path.relative_to(K8S)): path.read_text(encoding="utf-8") for path in files}
    for line in ("name: UCX_TCP_PORT_RANGE", "claimName: pdserve-models", "mountPath: /run/secrets/pdserve-peer"):
        owners = {name for name, text in texts.items() if line in text}
        assert owners - {"base/front/router.yaml", "base/model/fetch-model.yaml"} == {"base/workers/pod.yaml"}, line


def test_a_next_release_runs_alongside_the_base_and_serves_the_same_model_name() -> None:
    def own(name: str) -> set[str]:
        return {title(each) for each in documents(name)}

    assert own("base") & own("next-release") == set()
    for first, second in itertools.product(workloads("base"), workloads("next-release")):
        assert first.selector is None or not selects({"matchLabels": first.selector}, second.labels)
        assert second.selector is None or not selects({"matchLabels": second.selector}, first.labels)
    budgets = [*of_kind("base", "PodDisruptionBudget"), *of_kind("next-release", "PodDisruptionBudget")]
    for workload in (*workloads("base"), *workloads("next-release")):
        assert sum(selects(each["spec"]["selector"], workload.labels) for each in budgets) <= 1
    old, new = ({service.model[0] for service in services(name)} for name in ("base", "next-release"))
    assert old == new
    dirs = [{service.model[1] for service in services(name)} for name in ("base", "next-release")]
    assert dirs[0] & dirs[1] == set()
    claims = {
        volume["persistentVolumeClaim"]["claimName"]
        for name in ("base", "next-release")
        for workload in workloads(name)
        for volume in workload.spec["volumes"]
        if "persistentVolumeClaim" in volume
    }
    assert claims == {each["metadata"]["name"] for each in of_kind("base", "PersistentVolumeClaim")}


def test_gpu_workers_have_a_gpu_for_each_rank_and_shared_memory() -> None:
    for name in ("gpu", "rdma", "example"):
        for service in services(name):
            if service.module == "router_svc":
                continue
            limits = service.container["resources"]["limits"]
            assert limits == service.container["resources"]["requests"]
            assert int(limits["nvidia.com/gpu"]) == service.config.tensor_parallel_size
            assert service.config.device == "cuda"
            assert "pdserve-cuda:" in service.container["image"]
            [shm] = [each for each in service.workload.spec["volumes"] if each["name"] == "shm"]
            assert shm["emptyDir"]["medium"] == "Memory"
            assert ("rdma/hca" in limits) == (name == "rdma")


def test_the_page_shows_the_example_and_its_settings_reach_workers() -> None:
    text = (K8S / "overlays/example/kustomization.yaml").read_text(encoding="utf-8")
    assert text[text.index("apiVersion") :] in code_blocks("docs/operations/kubernetes.md", "yaml")
    settings = {service.module: service.config for service in services("example")}
    assert set(settings["router_svc"].models) == {"qwen3-8b"}
    prefill, decode = settings["prefill_svc"], settings["decode_svc"]
    assert (prefill.model_name, decode.model_name) == ("qwen3-8b", "qwen3-8b")
    assert (prefill.max_model_len, decode.max_model_len) == (32768, 32768)
    assert (prefill.tensor_parallel_size, decode.tensor_parallel_size) == (1, 2)
    assert decode.max_num_seqs == 128
    assert {each["metadata"]["namespace"] for each in documents("example")} == {"llm"}


def test_an_external_redis_replaces_ours() -> None:
    assert not [each for each in documents("external-redis") if "redis" in title(each)]
    configs = [service.config for service in services("external-redis")]
    assert {config.redis_url for config in configs} == {f"redis://:{OWN_REDIS}@redis.example:6379"}
    # Pods of two namespaces have the same names, so each namespace has keys of its own.
    assert {config.redis_prefix for config in configs} == {"ns"}
    [service] = [each for each in of_kind("base", "Service") if "redis" in title(each)]
    address = f"{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"
    expected = f"redis://{address}?password_file={PASSWORD_FILE}"
    assert {each.config.redis_url for each in services("base")} == {expected}


def test_an_external_store_of_responses_replaces_ours_and_nothing_else() -> None:
    ours = {title(each) for each in documents("base")} - {title(each) for each in documents("external-state")}
    kinds = ("NetworkPolicy", "PersistentVolumeClaim", "Service", "StatefulSet")
    assert ours == {f"{kind}/pdserve-state" for kind in kinds}
    [router] = [each for each in services("external-state") if each.module == "router_svc"]
    assert router.config.state_url == f"redis://:{OWN_STATE}@redis.example:6379"
    [service] = [each for each in of_kind("base", "Service") if title(each) == "Service/pdserve-state"]
    address = f"{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"
    expected = f"redis://{address}?password_file={STATE_PASSWORD_FILE}"
    for name in ("base", "external-redis", "same-pod", "disaggregatedset"):
        [router] = [each for each in services(name) if each.module == "router_svc"]
        assert router.config.state_url == expected


def test_what_the_model_job_writes_is_what_services_read() -> None:
    for name in ("base", "next-release"):
        [job] = [each for each in workloads(name) if each.component == "fetch-model"]
        [container] = job.containers
        data = config_map(name, container["envFrom"][0]["configMapRef"]["name"])
        assert container["args"] == ["$(MODEL_SOURCE)", "--to=/models/$(MODEL_DIR)"]
        assert {service.model[1] for service in services(name)} == {f"/models/{data['MODEL_DIR']}"}
        for workload in workloads(name):
            for each in workload.all_containers:
                for mount in each.get("volumeMounts", ()):
                    if mount["name"] == "models":
                        assert mount.get("readOnly", False) == (workload.component != "fetch-model")


def test_an_inference_pool_has_the_routers_and_their_port() -> None:
    [pool] = of_kind("inferencepool", "InferencePool")
    [router] = [each for each in workloads("inferencepool") if selects(pool["spec"]["selector"], each.labels)]
    assert router.component == "router"
    [port] = pool["spec"]["targetPorts"]
    [service] = [each for each in services("inferencepool") if each.module == "router_svc"]
    assert port["number"] == service.ports["http"]
    [route] = of_kind("inferencepool", "HTTPRoute")
    assert route["spec"]["rules"][0]["backendRefs"][0]["name"] == pool["metadata"]["name"]


def test_the_chart_kube_prometheus_stack_reads_what_has_the_label_of_its_release() -> None:
    kinds = {"PodMonitor", "PrometheusRule"}
    labels = {title(each): each["metadata"]["labels"] for each in of_kind("kube-prometheus-stack", *kinds)}
    assert labels.keys() == {title(each) for each in of_kind("monitoring", *kinds)}
    assert {each["release"] for each in labels.values()} == {"kube-prometheus-stack"}
    # The page says so before anything else about the overlay, and where autoscalers need its values.
    for heading in ("Monitoring", "Autoscaling"):
        first = section("docs/operations/kubernetes.md", heading).strip().split("\n\n")[0]
        assert "`kube-prometheus-stack`" in first, heading


def test_every_service_is_scraped_and_every_rule_is_in_the_overlay() -> None:
    monitors = [each["spec"] for each in of_kind("monitoring", "PodMonitor")]
    for name in ("base", "same-pod", "gpu", "disaggregatedset", "next-release"):
        for service in services(name):
            [monitor] = [each for each in monitors if selects(each["selector"], service.workload.labels)]
            ports = {each["port"] for each in monitor["podMetricsEndpoints"]}
            assert len(ports & service.ports.keys()) == 1, service.title
    files = {f"pdserve-{path.stem}": path for path in (MONITORING / "rules").glob("*.yaml")}
    rules = {each["metadata"]["name"]: each["spec"] for each in of_kind("monitoring", "PrometheusRule")}
    assert rules == {name: yaml.load(path.read_text(encoding="utf-8"), LOADER) for name, path in files.items()}
    dashboards = {key for each in of_kind("monitoring", "ConfigMap") for key in each["data"]}
    assert dashboards == {path.name for path in (MONITORING / "dashboards").glob("*.json")}
