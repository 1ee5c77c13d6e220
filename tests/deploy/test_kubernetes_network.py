"""Network policies deny by default, allow each connection that the services make, and open no other port."""

from __future__ import annotations

from typing import Any

import pytest

from tests.deploy.manifests import Workload, documents, selects, services, workloads

POLICIES = [document for document in documents("restricted") if document["kind"] == "NetworkPolicy"]
PORTS = {service.module: service.ports for service in services("restricted")}
[UCX_RANGE] = {
    variable["value"]
    for service in services("restricted")
    for variable in service.container["env"]
    if variable["name"] == "UCX_TCP_PORT_RANGE"
}
UCX = tuple(map(int, UCX_RANGE.split("-")))
WORKER, STREAM, HTTP = PORTS["decode_svc"]["grpc"], PORTS["decode_svc"]["stream"], PORTS["decode_svc"]["http"]
FLOWS = [
    *((client, "redis", 6379) for client in ("router", "prefill", "decode")),
    ("router", "prefill", WORKER),
    ("router", "decode", WORKER),
    ("router", "decode", STREAM),
    ("prefill", "decode", WORKER),
    *(flow for port in UCX for flow in (("prefill", "decode", port), ("decode", "prefill", port))),
    ("smoke-test", "router", PORTS["router_svc"]["http"]),
]


def pods(component: str) -> Workload:
    [workload] = [each for each in workloads("restricted") if each.component == component]
    return workload


def _reaches(peer: dict[str, Any], labels: dict[str, str]) -> bool:
    if peer == {"namespaceSelector": {}}:
        return True
    return "podSelector" in peer and "namespaceSelector" not in peer and selects(peer["podSelector"], labels)


def _has_port(rule: dict[str, Any], port: int) -> bool:
    return any(each["port"] <= port <= each.get("endPort", each["port"]) for each in rule["ports"])


def allows(side: str, this: Workload, other: Workload, port: int) -> bool:
    """Whether a policy of `this` lets traffic of one direction pass to or from `other`."""
    key = {"ingress": "from", "egress": "to"}[side]
    return any(
        _has_port(rule, port) and any(_reaches(peer, dict(other.labels)) for peer in rule[key])
        for policy in POLICIES
        if selects(policy["spec"]["podSelector"], this.labels)
        for rule in policy["spec"].get(side, ())
    )


def test_everything_is_denied_by_default() -> None:
    [default] = [policy for policy in POLICIES if policy["spec"]["podSelector"] == {}]
    assert sorted(default["spec"]["policyTypes"]) == ["Egress", "Ingress"]
    assert not {"ingress", "egress"} & default["spec"].keys()


@pytest.mark.parametrize(("client", "server", "port"), FLOWS)
def test_a_connection_that_is_needed_is_allowed_on_both_sides(client: str, server: str, port: int) -> None:
    assert allows("egress", pods(client), pods(server), port)
    assert allows("ingress", pods(server), pods(client), port)


@pytest.mark.parametrize(
    ("client", "server", "port"),
    [
        ("redis", "router", 8000),
        ("prefill", "router", 8000),
        ("decode", "prefill", WORKER),
        ("router", "decode", UCX[0]),
        ("smoke-test", "decode", WORKER),
        ("fetch-model", "redis", 6379),
        ("prefill", "decode", UCX[1] + 1),
    ],
)
def test_a_connection_that_nothing_needs_is_denied(client: str, server: str, port: int) -> None:
    assert not (
        allows("egress", pods(client), pods(server), port) and allows("ingress", pods(server), pods(client), port)
    )


def test_every_open_port_is_one_of_a_container_or_of_ucx() -> None:
    known = {port for ports in PORTS.values() for port in ports.values()} | {6379}
    for policy in POLICIES:
        for rule in policy["spec"].get("ingress", ()):
            for each in rule["ports"]:
                assert (each["port"], each.get("endPort")) == UCX or each["port"] in known, policy["metadata"]["name"]


def test_names_models_and_metrics_are_reached() -> None:
    def rules(component: str, side: str) -> list[dict[str, Any]]:
        labels = pods(component).labels
        matching = [each["spec"] for each in POLICIES if selects(each["spec"]["podSelector"], labels)]
        return [rule for spec in matching for rule in spec.get(side, ())]

    for workload in workloads("restricted"):
        assert any(_has_port(rule, 53) for rule in rules(workload.component, "egress")), workload.title
    assert any(_has_port(rule, 443) for rule in rules("fetch-model", "egress"))
    monitoring = {"kubernetes.io/metadata.name": "monitoring"}
    for component in ("prefill", "decode"):
        scrapes = [
            rule
            for rule in rules(component, "ingress")
            if any(
                selects(peer.get("namespaceSelector", {"matchLabels": {"-": "-"}}), monitoring) for peer in rule["from"]
            )
        ]
        assert any(_has_port(rule, HTTP) for rule in scrapes)
    clients = [rule for rule in rules("router", "ingress") if {"namespaceSelector": {}} in rule["from"]]
    assert all(_has_port(clients[0], port) for port in PORTS["router_svc"].values())


def test_the_namespace_enforces_the_restricted_level_and_holds_everything() -> None:
    [namespace] = [each for each in documents("restricted") if each["kind"] == "Namespace"]
    labels = namespace["metadata"]["labels"]
    assert {labels[f"pod-security.kubernetes.io/{mode}"] for mode in ("enforce", "audit", "warn")} == {"restricted"}
    others = [each for each in documents("restricted") if each["kind"] != "Namespace"]
    assert {each["metadata"]["namespace"] for each in others} == {namespace["metadata"]["name"]}
