"""The rendered manifests as objects, and what tests ask of them: workloads, containers, settings, who selects whom."""

from __future__ import annotations

import argparse
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from decode_svc.config import DecodeConfig
from pdserve.base.config import add_options, from_arguments
from prefill_svc.config import PrefillConfig
from router_svc.config import RouterConfig
from tests.deploy.render import overlays, rendered

Object = dict[str, Any]

#: The loader in C, where PyYAML has it: some renders are long.
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
NAMES = sorted(overlays())
#: Overlays without pods.
MONITORS = {"kube-prometheus-stack", "monitoring"}
#: Settings by what a container runs. Workers that change their role have those of decode workers.
CONFIGS: dict[str, type[Any]] = {
    "router_svc": RouterConfig,
    "prefill_svc": PrefillConfig,
    "decode_svc": DecodeConfig,
    "worker_svc.prefill": DecodeConfig,
    "worker_svc.decode": DecodeConfig,
}
WORKERS = ("prefill_svc", "decode_svc")
#: Values for what a pod knows only when it runs.
_POD = {"metadata.name": "pod-0", "metadata.namespace": "ns", "status.podIP": "10.0.0.7"}
#: The URL in a Secret of the user's own.
_URL = "redis://:{password}@redis.example:6379"


@cache
def documents(name: str) -> tuple[Object, ...]:
    """The objects of a render."""
    return tuple(document for document in yaml.load_all(rendered(name), Loader=LOADER) if document)


def of_kind(name: str, *kinds: str) -> list[Object]:
    """The objects of these kinds in a render."""
    return [document for document in documents(name) if document["kind"] in kinds]


def title(document: Object) -> str:
    """Kind and name of an object, for messages."""
    return f"{document['kind']}/{document['metadata']['name']}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Something that makes pods."""

    render: str
    title: str
    #: Labels by which it finds its pods; None: a Job.
    selector: Mapping[str, str] | None
    #: Pods that it makes by default; None: an autoscaler decides.
    replicas: int | None
    labels: Mapping[str, str]
    spec: Object

    @property
    def component(self) -> str:
        """The value of app.kubernetes.io/component."""
        return self.labels["app.kubernetes.io/component"]

    @property
    def containers(self) -> list[Object]:
        """The containers that run, without those that initialize."""
        return list(self.spec["containers"])

    @property
    def all_containers(self) -> list[Object]:
        """All containers."""
        return [*self.spec.get("initContainers", ()), *self.spec["containers"]]


@cache
def workloads(name: str) -> tuple[Workload, ...]:
    """All workloads of a render."""
    return tuple(_workloads(name))


def _workloads(name: str) -> Iterator[Workload]:
    for document in documents(name):
        spec = document.get("spec", {})
        match document["kind"]:
            case "Deployment" | "StatefulSet":
                yield _workload(name, title(document), spec["template"], spec["selector"]["matchLabels"], spec)
            case "DaemonSet":
                yield _workload(name, title(document), spec["template"], spec["selector"]["matchLabels"], {})
            case "Job":
                yield _workload(name, title(document), spec["template"], None, {"replicas": 1})
            case "DisaggregatedSet":
                for role in spec["roles"]:
                    template = role["spec"]["leaderWorkerTemplate"]["workerTemplate"]
                    yield _workload(name, f"{title(document)}/{role['name']}", template, None, role["spec"])


def _workload(name: str, where: str, template: Object, selector: Mapping[str, str] | None, owner: Object) -> Workload:
    return Workload(
        render=name,
        title=f"{name}: {where}",
        selector=selector,
        replicas=owner.get("replicas"),
        labels=template["metadata"]["labels"],
        spec=template["spec"],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A container that runs one of our services, with the settings that it would start with."""

    workload: Workload
    container: Object
    #: What it runs; of a worker that changes its role, the service of the tier in which it starts.
    module: str
    #: What it is at any time.
    roles: frozenset[str]
    config: Any

    @property
    def model(self) -> tuple[str, str]:
        """Name and directory of its only model."""
        if isinstance(self.config, RouterConfig):
            [(name, directory)] = self.config.models.items()
            return name, str(directory)
        return self.config.model_name, str(self.config.model_dir)

    @property
    def title(self) -> str:
        """Where it is, for messages."""
        return f"{self.workload.title}/{self.container['name']}"

    @property
    def ports(self) -> dict[str, int]:
        """The container's ports by name."""
        return {port["name"]: port["containerPort"] for port in self.container["ports"]}


@cache
def services(name: str) -> tuple[Service, ...]:
    """All containers of a render that run a service. Raises `SetupError` for settings that the service refuses."""
    return tuple(service for workload in workloads(name) for service in services_of(workload))


def services_of(workload: Workload) -> list[Service]:
    """The same for one workload."""
    return [
        Service(
            workload=workload,
            container=container,
            module=_service_of(module),
            roles=frozenset(WORKERS if module.startswith("worker_svc.") else {module}),
            config=_config(workload, container, module),
        )
        for container in workload.containers
        if (module := module_of(container)) in CONFIGS and module is not None
    ]


def _service_of(module: str) -> str:
    package, _, tier = module.partition(".")
    return f"{tier}_svc" if tier else package


def module_of(container: Object) -> str | None:
    """The Python module that a container runs."""
    command = container.get("command", [])
    return command[-1] if command[:1] == ["python"] and "-m" in command else None


def config_map(name: str, config_name: str) -> dict[str, str]:
    """The data of a ConfigMap. The model's is in the base, for overlays that do not have it."""
    found = [each["data"] for each in of_kind(name, "ConfigMap") if each["metadata"]["name"] == config_name]
    assert found, f"{name} has no ConfigMap {config_name}"
    return dict(found[0])


def environment(name: str, container: Object) -> dict[str, str]:
    """The variables of a container, with values for what only a running pod knows."""
    found: dict[str, str] = {}
    for source in container.get("envFrom", ()):
        found |= config_map(name, source["configMapRef"]["name"])
    for variable in container.get("env", ()):
        found[variable["name"]] = expanded(_value(name, container, variable), found)
    return found


def _value(name: str, container: Object, variable: Object) -> str:
    match variable:
        case {"value": value}:
            return str(value)
        case {"valueFrom": {"configMapKeyRef": {"name": config_name, "key": key}}}:
            return config_map(name, config_name)[key]
        case {"valueFrom": {"fieldRef": {"fieldPath": path}}}:
            return _POD[path]
        case {"valueFrom": {"resourceFieldRef": {"resource": "limits.cpu", "containerName": owner}}}:
            assert owner == container["name"]
            return str(container["resources"]["limits"]["cpu"])
        case {"valueFrom": {"secretKeyRef": {"optional": True}}}:
            return ""
        case {"valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}:
            value = secret_value(secret, key)
            return _URL.format(password=value) if key == "url" else value
    raise AssertionError(f"{name}: {variable}")


def secret_value(secret: str, key: str) -> str:
    """What stands in tests for the value of a Secret's key."""
    return f"{secret}.{key}"


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """The text with each `$(NAME)` replaced, as the kubelet does. Raises KeyError for a variable that is not there."""
    return re.sub(r"\$\((\w+)\)", lambda match: variables[match[1]], text)


def _config(workload: Workload, container: Object, module: str) -> Any:
    """The settings from arguments, environment and config file, read by the service's own loader."""
    name, service = workload.render, _service_of(module)
    variables = environment(name, container)
    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    add_options(parser, CONFIGS[module])
    arguments, unknown = parser.parse_known_args([expanded(each, variables) for each in container["args"]])
    assert unknown == [], f"{workload.title}: {unknown}"
    path = Path(arguments.config or variables[f"PDSERVE_{service.removesuffix('_svc').upper()}__CONFIG"])
    [mount] = [each for each in container["volumeMounts"] if each["mountPath"] == str(path.parent)]
    [volume] = [each for each in workload.spec["volumes"] if each["name"] == mount["name"]]
    with tempfile.NamedTemporaryFile("w", suffix=".toml", encoding="utf-8") as file:
        file.write(config_map(name, volume["configMap"]["name"])[path.name])
        file.flush()
        arguments.config = file.name
        return from_arguments(CONFIGS[module], service, arguments, variables)


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether a label selector matches; an empty one matches everything."""
    assert selector.keys() <= {"matchLabels", "matchExpressions"}
    expressions = selector.get("matchExpressions", ())
    assert all(each["operator"] == "In" for each in expressions)
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        labels.get(each["key"]) in each["values"] for each in expressions
    )
