"""Where models are: pods on every node can read them, and what fetches them writes where the others read."""

from __future__ import annotations

import pytest

from tests.arch.documents import section
from tests.deploy.manifests import Object, Service, Workload, config_map, of_kind, services, workloads
from tests.deploy.render import K8S

#: Renders for several nodes, with the kind of their volume.
ON_MANY_NODES = {"example": "persistentVolumeClaim", "models-image": "image", "models-per-node": "hostPath"}


def volume_of(workload: Workload) -> Object:
    [volume] = [each for each in workload.spec["volumes"] if each["name"] == "models"]
    return {key: value for key, value in volume.items() if key != "name"}


def fetching(name: str) -> list[tuple[Workload, Object]]:
    """Containers that fetch the model."""
    return [
        (workload, container)
        for workload in workloads(name)
        for container in workload.all_containers
        if container.get("command", [])[:2] == ["pdserve", "fetch"]
    ]


@pytest.mark.parametrize("name", ON_MANY_NODES)
def test_pods_on_any_node_can_mount_the_models(name: str) -> None:
    readers = services(name)
    assert {service.module for service in readers} == {"router_svc", "prefill_svc", "decode_svc"}
    [volume] = {str(volume_of(service.workload)): volume_of(service.workload) for service in readers}.values()
    assert volume.keys() == {ON_MANY_NODES[name]}
    claims = [each for each in of_kind(name, "PersistentVolumeClaim") if each["metadata"]["name"] == "pdserve-models"]
    assert [each["spec"]["accessModes"] for each in claims] == ([["ReadWriteMany"]] if name == "example" else [])


@pytest.mark.parametrize("name", sorted({"base", *ON_MANY_NODES} - {"models-image"}))
def test_the_model_is_fetched_to_where_services_read_it(name: str) -> None:
    [(workload, container)] = fetching(name)
    assert container["args"] == ["$(MODEL_SOURCE)", "--to=/models/$(MODEL_DIR)"]
    model = config_map(name, container["envFrom"][0]["configMapRef"]["name"])
    for service in services(name):
        assert service.model[1] == f"/models/{model['MODEL_DIR']}"
        assert volume_of(service.workload) == volume_of(workload)
    assert workload.title.startswith(f"{name}: " + ("DaemonSet" if name == "models-per-node" else "Job"))


def test_with_an_image_nothing_is_fetched_and_it_is_named_like_any_other() -> None:
    assert fetching("models-image") == []
    for service in services("models-image"):
        reference = volume_of(service.workload)["image"]["reference"]
        assert reference.startswith("registry.example/pdserve-models:")


def test_a_node_that_takes_workers_takes_what_fetches_their_model() -> None:
    [(daemon, _)] = fetching("models-per-node")
    workers: list[Service] = [each for each in services("gpu") if each.module != "router_svc"]
    for service in workers:
        assert all(each in daemon.spec["tolerations"] for each in service.workload.spec["tolerations"])
    assert not {"nodeSelector", "affinity"} & daemon.spec.keys()


def test_the_page_has_every_way_to_bring_a_model() -> None:
    page = section("docs/operations/kubernetes.md", "Where models are")
    for path in (K8S / "components").glob("models-*"):
        assert f"| `{path.name}` |" in page
