"""Network policies: pods take the connections that services make and no other; the overlay limits both directions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.deploy.connections import OPENERS, connections, openers
from tests.deploy.manifests import (
    MONITORS,
    NAMES,
    WORKERS,
    Object,
    Workload,
    documents,
    of_kind,
    selects,
    services,
    workloads,
)

PORTS = {service.module: service.ports for service in services("base")}
[UCX_RANGE] = {
    variable["value"]
    for name in NAMES
    for service in services(name)
    for variable in service.container["env"]
    if variable["name"] == "UCX_TCP_PORT_RANGE"
}
UCX = tuple(map(int, UCX_RANGE.split("-")))
WORKER, STREAM, HTTP = PORTS["decode_svc"]["grpc"], PORTS["decode_svc"]["stream"], PORTS["decode_svc"]["http"]
API, GRPC, ADMIN = (PORTS["router_svc"][name] for name in ("http", "grpc", "admin"))
REDIS = 6379
MONITORING = {"kubernetes.io/metadata.name": "monitoring"}

#: Renders with pods of a cluster and policies of their own.
CLUSTERS = sorted(set(NAMES) - MONITORS - {"next-release"})


def flows(name: str) -> Iterator[tuple[str, str, int]]:
    """Connections that the code needs: components of client and server, and port."""
    for client in services(name):
        owner = client.workload.component
        if name != "external-redis":
            yield owner, "redis", REDIS
        if client.module == "router_svc" and name != "external-state":
            yield owner, "state", REDIS
        for server in services(name):
            for kind in {kind for a, b, kind in connections() if a in client.roles and b in server.roles}:
                # Containers of one pod have names of their own for their ports.
                ports = [port for key, port in server.ports.items() if key.endswith(kind)]
                for port in UCX if kind == "kv" else ports:
                    yield owner, server.workload.component, port
    yield "smoke-test", "router", API


FLOWS = sorted({(name, *flow) for name in CLUSTERS for flow in flows(name)})


def pods(component: str, name: str = "base") -> Workload:
    [workload] = [each for each in workloads(name) if each.component == component]
    return workload


def _reaches(peer: Object, labels: dict[str, str], namespace: dict[str, str] | None) -> bool:
    """Whether a peer of a rule covers a pod of another namespace with these labels; None: of the policy's own."""
    if "namespaceSelector" in peer:
        assert peer.keys() == {"namespaceSelector"}
        return selects(peer["namespaceSelector"], namespace or {})
    return namespace is None and "podSelector" in peer and selects(peer["podSelector"], labels)


def _has_port(rule: Object, port: int) -> bool:
    return any(each["port"] <= port <= each.get("endPort", each["port"]) for each in rule["ports"])


def _policies(side: str, this: Workload) -> Iterator[Object]:
    """The policies that limit a direction of a pod."""
    for policy in of_kind("base" if this.render == "next-release" else this.render, "NetworkPolicy"):
        if side.title() in policy["spec"]["policyTypes"] and selects(policy["spec"]["podSelector"], this.labels):
            yield policy


def allows(
    side: str, this: Workload, other: dict[str, str], port: int, namespace: dict[str, str] | None = None
) -> bool:
    """Whether traffic of one direction passes to or from a pod with the labels `other`."""
    policies = list(_policies(side, this))
    key = {"ingress": "from", "egress": "to"}[side]
    return not policies or any(
        _has_port(rule, port) and (key not in rule or any(_reaches(peer, other, namespace) for peer in rule[key]))
        for policy in policies
        for rule in policy["spec"].get(side, ())
    )


def test_the_code_has_the_paths_that_are_known_to_exist_and_opens_connections_nowhere_else() -> None:
    """Fails when a path is renamed, or made of something else, so that `connections` does not see it."""
    prompts, replicas = ("router_svc", "prefill_svc", "grpc"), ("decode_svc", "decode_svc", "grpc")
    blocks = {(sender, receiver, "kv") for sender in WORKERS for receiver in WORKERS}
    assert {prompts, replicas, ("router_svc", "decode_svc", "stream"), *blocks} <= connections()
    assert openers() == OPENERS


@pytest.mark.parametrize(("name", "client", "server", "port"), FLOWS)
def test_a_connection_that_is_needed_is_allowed_on_both_sides(name: str, client: str, server: str, port: int) -> None:
    assert allows("egress", pods(client, name), dict(pods(server, name).labels), port)
    assert allows("ingress", pods(server, name), dict(pods(client, name).labels), port)


@pytest.mark.parametrize(
    ("client", "server", "port"),
    [
        ("router", "decode", UCX[0]),
        ("smoke-test", "decode", WORKER),
        ("smoke-test", "redis", REDIS),
        ("smoke-test", "router", ADMIN),
        ("fetch-model", "redis", REDIS),
        ("secrets", "redis", REDIS),
        *(
            (client, "state", REDIS)
            for client in ("prefill", "decode", "redis", "smoke-test", "fetch-model", "secrets")
        ),
        ("prefill", "decode", STREAM),
        ("prefill", "decode", UCX[1] + 1),
    ],
)
def test_a_connection_that_nothing_needs_is_denied(client: str, server: str, port: int) -> None:
    assert not allows("ingress", pods(server), dict(pods(client).labels), port)


@pytest.mark.parametrize("name", sorted(set(NAMES) - MONITORS))
def test_strangers_reach_the_api_and_nothing_else(name: str) -> None:
    """Fails if a policy of the base is left out, or selects other pods than it is for."""
    numbers = {port for service in services(name) for port in service.ports.values()} | {REDIS, *UCX, 1, 65535}
    strangers: list[dict[str, str] | None] = [{"kubernetes.io/metadata.name": "another"}, None]
    for workload in workloads(name):
        for namespace in strangers:
            open_to = {port for port in numbers if allows("ingress", workload, {"app": "stranger"}, port, namespace)}
            expected = {API, GRPC} if workload.component == "router" else set()
            assert open_to == expected, f"{workload.title} from {namespace}"


@pytest.mark.parametrize("name", sorted(set(NAMES) - MONITORS))
def test_prometheus_reaches_the_ports_of_metrics_and_the_admin_port_is_for_it_alone(name: str) -> None:
    for service in services(name):
        metrics = {ADMIN} if service.module == "router_svc" else {service.config.http_port}
        reached = {port for port in service.ports.values() if allows("ingress", service.workload, {}, port, MONITORING)}
        assert metrics <= reached
        assert (reached - metrics) & {WORKER, STREAM, *UCX} == set()


def test_the_ports_of_ucx_are_pinned_on_every_worker() -> None:
    for name in NAMES:
        for service in services(name):
            variables = {each["name"]: each.get("value") for each in service.container["env"]}
            if service.module != "router_svc":
                assert variables["UCX_TCP_PORT_RANGE"] == UCX_RANGE


def test_everything_is_denied_by_default() -> None:
    [default] = [each for each in of_kind("restricted", "NetworkPolicy") if each["spec"]["podSelector"] == {}]
    assert sorted(default["spec"]["policyTypes"]) == ["Egress", "Ingress"]
    assert not {"ingress", "egress"} & default["spec"].keys()
    # Without labels, as another application's pod is.
    assert not allows("egress", pods("redis", "restricted"), {}, API)


def test_clients_from_outside_of_the_cluster_are_shut_off_in_the_restricted_namespace_alone() -> None:
    for name, expected in (("base", None), ("restricted", [{"namespaceSelector": {}}])):
        [policy] = [each for each in of_kind(name, "NetworkPolicy") if each["metadata"]["name"] == "pdserve-router"]
        [rule] = [each for each in policy["spec"]["ingress"] if _has_port(each, API)]
        assert rule.get("from") == expected


def test_every_open_port_is_one_of_a_container_or_of_ucx() -> None:
    known = {port for name in NAMES for service in services(name) for port in service.ports.values()} | {REDIS}
    for name in NAMES:
        for policy in of_kind(name, "NetworkPolicy"):
            for rule in policy["spec"].get("ingress", ()):
                for each in rule["ports"]:
                    assert (each["port"], each.get("endPort")) == UCX or each["port"] in known, policy["metadata"]


def test_names_models_and_the_api_server_are_reached() -> None:
    def rules(component: str) -> list[dict[str, Any]]:
        policies = _policies("egress", pods(component, "restricted"))
        return [rule for policy in policies for rule in policy["spec"].get("egress", ())]

    for workload in workloads("restricted"):
        assert any(_has_port(rule, 53) for rule in rules(workload.component)), workload.title
    assert any(_has_port(rule, 443) for rule in rules("fetch-model"))
    assert any(_has_port(rule, 6443) and _has_port(rule, 443) for rule in rules("secrets"))


def test_the_namespace_enforces_the_restricted_level_and_holds_everything() -> None:
    [namespace] = of_kind("restricted", "Namespace")
    labels = namespace["metadata"]["labels"]
    assert {labels[f"pod-security.kubernetes.io/{mode}"] for mode in ("enforce", "audit", "warn")} == {"restricted"}
    objects = [each for each in documents("restricted") if each["kind"] != "Namespace"]
    assert {each["metadata"]["namespace"] for each in objects} == {namespace["metadata"]["name"]}
