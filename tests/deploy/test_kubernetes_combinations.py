"""Components that an overlay of one's own combines, rendered as one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.deploy import manifests
from tests.deploy.manifests import NAMES, of_kind, services, workloads
from tests.deploy.render import K8S, render, rendered
from tests.deploy.test_kubernetes_network import allows, flows, pods
from tests.support.tools import tool


@pytest.fixture
def combined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """The name of a render of the base with these components."""
    components: tuple[str, ...] = request.param
    shutil.copytree(K8S, tmp_path / "k8s")
    directory, name = tmp_path / "k8s/overlays/combined", "+".join(components)
    directory.mkdir()
    lines = ["resources: [../../base]", f"components: [{', '.join(f'../../components/{each}' for each in components)}]"]
    (directory / "kustomization.yaml").write_text("\n".join(lines), encoding="utf-8")
    text = render(tool("kubectl"), directory)
    monkeypatch.setattr(manifests, "rendered", lambda other: text if other == name else rendered(other))
    assert name not in NAMES
    return name


@pytest.mark.parametrize("combined", [("same-pod", "network-policies"), ("gpu", "network-policies")], indirect=True)
def test_everything_that_is_needed_passes_where_nothing_else_does(combined: str) -> None:
    found = set(flows(combined))
    assert found
    for client, server, port in found:
        assert allows("egress", pods(client, combined), dict(pods(server, combined).labels), port)
        assert allows("ingress", pods(server, combined), dict(pods(client, combined).labels), port)


@pytest.mark.parametrize(
    "combined",
    [("gpu", "disaggregatedset"), ("models-per-node", "gpu", "same-pod"), ("models-image", "gpu", "disaggregatedset")],
    indirect=True,
)
def test_roles_and_pairs_have_what_components_change_of_workers(combined: str) -> None:
    assert not {"pdserve-prefill", "pdserve-decode"} & {
        each["metadata"]["name"] for each in of_kind(combined, "StatefulSet")
    }
    found = [each for each in services(combined) if each.module != "router_svc"]
    assert sorted(each.module for each in found) == ["decode_svc", "prefill_svc"]
    for service in found:
        assert service.config.device == "cuda"
        assert service.roles == {service.module}
        assert service.container["image"].startswith("pdserve-cuda:")
        assert service.container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    kind = {"models-per-node": "hostPath", "models-image": "image"}.get(
        combined.partition("+")[0], "persistentVolumeClaim"
    )
    for workload in (each for each in workloads(combined) if each.component in ("router", "prefill", "decode", "pair")):
        [volume] = [each for each in workload.spec["volumes"] if each["name"] == "models"]
        assert kind in volume, workload.title
