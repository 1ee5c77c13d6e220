"""No workload runs without what protects it, everything comes from two Secrets, and one Job may make these."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from pdserve.cli.__main__ import COMMANDS
from pdserve.cli.cluster_secrets.contents import new_secrets
from router_svc.config import RouterConfig
from tests.deploy.manifests import (
    MONITORS,
    NAMES,
    Object,
    Workload,
    config_map,
    documents,
    of_kind,
    selects,
    services,
    workloads,
)
from tests.deploy.secret_policy import PEER_NAME, faults, secret_of

SECRET, STATE_SECRET = "pdserve-secrets", "pdserve-secrets-state"
#: Keys of the Secret, and the components whose pods have them. A pod has what it needs and nothing else.
READERS = {
    "cluster-secret": {"router", "prefill", "decode", "pair"},
    "peer-ca.pem": {"router", "prefill", "decode", "pair"},
    "peer.pem": {"router", "prefill", "decode", "pair"},
    "peer-key.pem": {"router", "prefill", "decode", "pair"},
    "redis-password": {"router", "prefill", "decode", "pair", "redis"},
    "api-keys.toml": {"router"},
    "smoke-test-key": {"smoke-test"},
}
#: The same for the Secret of the store of responses.
STATE_READERS = {"state-password": {"router", "state"}}


def workload(component: str, name: str = "base") -> Workload:
    [found] = [each for each in workloads(name) if each.component == component]
    return found


def test_the_secret_has_the_keys_that_pods_and_prometheus_read() -> None:
    groups = new_secrets(datetime.now(UTC))
    made = {SECRET + suffix: set[str]() for suffix in {group.secret_suffix for group in groups}}
    for group in groups:
        made[SECRET + group.secret_suffix] |= group.files.keys()
    assert made == {SECRET: READERS.keys() | {"metrics-key"}, STATE_SECRET: STATE_READERS.keys()}


def read_keys(each: Workload) -> set[tuple[str, str]]:
    """Secrets and keys that a workload's pods can read."""
    found = set()
    for volume in each.spec.get("volumes", ()):
        if "secret" in volume:
            found |= {(volume["secret"]["secretName"], item["key"]) for item in volume["secret"]["items"]}
    for container in each.all_containers:
        assert not any("secretRef" in source for source in container.get("envFrom", ()))
        for variable in container.get("env", ()):
            reference = variable.get("valueFrom", {}).get("secretKeyRef")
            if reference is not None:
                found.add((reference["name"], reference["key"]))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_no_workload_runs_without_cluster_secret_peer_tls_keys_or_a_redis_password(name: str) -> None:
    assert [fault for each in workloads(name) for fault in faults(each)] == []


Mutation = Callable[[Object, Object], None]


def without_argument(flag: str) -> Mutation:
    """Removes a flag of the container."""

    def mutate(_: Object, container: Object) -> None:
        before = len(container["args"])
        container["args"] = [each for each in container["args"] if not each.startswith(f"--{flag}=")]
        assert len(container["args"]) == before - 1

    return mutate


def with_url(url: str, name: str = "REDIS_URL") -> Mutation:
    """Writes the URL of Redis out."""

    def mutate(_: Object, container: Object) -> None:
        [variable] = [each for each in container["env"] if each["name"].endswith(name)]
        variable["value"] = url

    return mutate


def with_empty_volume(name: str) -> Mutation:
    """Replaces a Secret's volume."""

    def mutate(spec: Object, _: Object) -> None:
        [volume] = [each for each in spec["volumes"] if each["name"] == name]
        del volume["secret"]
        volume["emptyDir"] = {}

    return mutate


def without_item(key: str) -> Mutation:
    """Leaves a key of the Secret out."""

    def mutate(spec: Object, _: Object) -> None:
        for volume in spec["volumes"]:
            if "secret" in volume:
                volume["secret"]["items"] = [each for each in volume["secret"]["items"] if each["key"] != key]

    return mutate


def with_requirepass(line: str) -> Mutation:
    """Replaces the line of Redis' configuration."""

    def mutate(_: Object, container: Object) -> None:
        script = container["command"][2]
        container["command"][2] = re.sub("requirepass .*\n", line, script)
        assert container["command"][2] != script

    return mutate


MUTATIONS: list[tuple[str, Mutation, str]] = [
    *((tier, without_argument("cluster-secret-file"), "no cluster secret") for tier in ("router", "prefill", "decode")),
    *((tier, with_empty_volume("secrets"), "no cluster secret") for tier in ("router", "decode")),
    ("prefill", without_item("cluster-secret"), "no cluster secret"),
    *(
        ("decode", without_argument(f"peer-ssl-{flag}"), "no TLS between peers")
        for flag in ("certfile", "keyfile", "ca-certs")
    ),
    ("router", with_empty_volume("peer-tls"), "no TLS between peers"),
    ("prefill", without_item("peer-key.pem"), "no TLS between peers"),
    ("prefill", without_argument("peer-ssl-server-name"), "no name of peers"),
    ("router", without_argument("api-keys-file"), "no API keys"),
    ("router", without_item("api-keys.toml"), "no API keys"),
    ("router", without_argument("admin-port"), "no admin port"),
    *(
        (tier, with_url("redis://pdserve-redis:6379"), "Redis without a password")
        for tier in ("router", "prefill", "decode")
    ),
    ("decode", with_url("redis://:hunter2@pdserve-redis:6379"), "Redis without a password"),
    *((tier, without_item("redis-password"), "Redis without a password") for tier in ("router", "redis")),
    ("redis", with_requirepass(""), "Redis without a password"),
    ("redis", with_requirepass("requirepass hunter2\n"), "Redis without a password"),
    *(
        ("router", with_url(url, "STATE_URL"), "no store of responses with a password")
        for url in (
            "redis://pdserve-state:6379",
            "redis://:hunter2@pdserve-state:6379",
            "redis://pdserve-state:6379?password_file=/run/secrets/pdserve/redis-password",
        )
    ),
    ("router", with_empty_volume("state-secrets"), "no store of responses with a password"),
    ("state", without_item("state-password"), "Redis without a password"),
    ("state", with_requirepass(""), "Redis without a password"),
    ("state", with_requirepass("requirepass hunter2\n"), "Redis without a password"),
]


@pytest.mark.parametrize(("component", "mutate", "fault"), MUTATIONS)
def test_a_workload_that_lacks_one_of_them_is_found(component: str, mutate: Mutation, fault: str) -> None:
    original = workload(component)
    spec = copy.deepcopy(original.spec)
    mutate(spec, spec["containers"][0])
    found = faults(dataclasses.replace(original, spec=spec))
    assert any(each.endswith(f": {fault}") for each in found), found


@pytest.mark.parametrize("name", NAMES)
def test_pods_read_their_own_keys_of_the_secret_and_no_other(name: str) -> None:
    for each in workloads(name):
        keys = {key for secret, key in read_keys(each) if secret == SECRET}
        expected = {key for key, components in READERS.items() if each.component in components}
        if name == "own-secrets":
            expected -= {key for key in READERS if key.startswith("peer")}
        assert keys == expected, each.title
        keys = {key for secret, key in read_keys(each) if secret == STATE_SECRET}
        has_state = name != "external-state"
        expected = {key for key, components in STATE_READERS.items() if has_state and each.component in components}
        assert keys == expected, each.title
        others = {secret for secret, _ in read_keys(each)} - {SECRET, STATE_SECRET}
        assert others <= {"pdserve-hub", "pdserve-redis", "pdserve-peer-tls"} | (
            set() if has_state else {"pdserve-state"}
        )


def test_no_secret_is_written_into_a_manifest() -> None:
    for name in NAMES:
        assert of_kind(name, "Secret") == []
        for each in of_kind(name, "ConfigMap"):
            if name not in MONITORS:
                assert not any("redis" in text for text in config_map(name, each["metadata"]["name"]).values())


def test_files_of_secrets_are_read_only_and_not_for_all_users() -> None:
    for name in NAMES:
        for each in workloads(name):
            for volume in each.spec.get("volumes", ()):
                if "secret" in volume:
                    assert volume["secret"]["defaultMode"] == 0o440
                    assert each.spec["securityContext"]["fsGroup"] > 0


def test_the_certificates_of_peers_have_a_volume_of_their_own_so_that_another_issuer_can_replace_them() -> None:
    for name in NAMES:
        for service in services(name):
            volumes = {each["name"]: each for each in service.workload.spec["volumes"]}
            assert {item["path"] for item in volumes["peer-tls"]["secret"]["items"]} == {
                *("peer-ca.pem", "peer.pem", "peer-key.pem")
            }
            by_cert_manager = name == "own-secrets"
            expected = ("pdserve-peer-tls", "tls.key") if by_cert_manager else (SECRET, "peer-key.pem")
            assert secret_of(service.workload, service.container, service.config.peer_ssl_keyfile) == expected


def test_cert_manager_makes_certificates_with_the_name_and_the_uses_of_peers() -> None:
    authority, peer = (each["spec"] for each in of_kind("own-secrets", "Certificate"))
    issuers = {each["metadata"]["name"]: each["spec"] for each in of_kind("own-secrets", "Issuer")}
    if not authority.get("isCA"):
        authority, peer = peer, authority
    assert issuers[peer["issuerRef"]["name"]] == {"ca": {"secretName": authority["secretName"]}}
    assert issuers[authority["issuerRef"]["name"]] == {"selfSigned": {}}
    assert peer["dnsNames"] == [PEER_NAME]
    assert {"server auth", "client auth"} <= set(peer["usages"])
    assert peer["secretName"] == "pdserve-peer-tls"


def test_who_brings_the_secret_has_no_job_that_makes_one_and_no_right_to_it() -> None:
    kinds = {each["kind"] for each in documents("own-secrets")}
    assert not {"Role", "RoleBinding", "ServiceAccount"} & kinds
    assert "secrets" not in {each.component for each in workloads("own-secrets")}


def rules_of(name: str) -> list[dict[str, Any]]:
    [role] = of_kind(name, "Role")
    return list(role["rules"])


def test_one_job_makes_the_secret_and_has_no_other_right() -> None:
    job = workload("secrets")
    [container] = job.containers
    assert container["command"][:2] == ["pdserve", "secrets"]
    assert container["command"][1] in COMMANDS
    assert container["args"] == [f"--kubernetes-secret={SECRET}"]
    assert rules_of("base") == [
        {"apiGroups": [""], "resources": ["secrets"], "verbs": ["create"]},
        {"apiGroups": [""], "resources": ["secrets"], "resourceNames": [SECRET, STATE_SECRET], "verbs": ["get"]},
    ]
    [binding], [account] = of_kind("base", "RoleBinding"), of_kind("base", "ServiceAccount")
    assert binding["roleRef"]["kind"] == "Role"
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account["metadata"]["name"]}]
    assert account["automountServiceAccountToken"] is False
    for name in NAMES:
        assert of_kind(name, "ClusterRole", "ClusterRoleBinding") == []
        for each in workloads(name):
            has_token = each.spec["automountServiceAccountToken"] or "serviceAccountName" in each.spec
            assert has_token == (each.component == "secrets"), each.title
            if has_token:
                assert each.spec["serviceAccountName"] == account["metadata"]["name"]


def test_prometheus_reads_routers_on_the_admin_port_with_the_key_for_metrics() -> None:
    monitors = {each["metadata"]["name"]: each["spec"] for each in of_kind("monitoring", "PodMonitor")}
    [endpoint] = monitors["pdserve-router"]["podMetricsEndpoints"]
    assert endpoint["authorization"] == {"type": "Bearer", "credentials": {"name": SECRET, "key": "metrics-key"}}
    for service in services("base"):
        is_router = isinstance(service.config, RouterConfig)
        assert selects(monitors["pdserve-router"]["selector"], service.workload.labels) == is_router
        assert selects(monitors["pdserve-workers"]["selector"], service.workload.labels) != is_router
        if is_router:
            assert service.ports[endpoint["port"]] == service.config.admin_port
    # Workers get no key that they have not asked for.
    assert all("authorization" not in each for each in monitors["pdserve-workers"]["podMetricsEndpoints"])


def test_the_admin_port_is_in_no_service() -> None:
    for name in NAMES:
        for each in of_kind(name, "Service"):
            assert all(port["targetPort"] != "admin" for port in each["spec"]["ports"])
