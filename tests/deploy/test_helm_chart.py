"""The Helm chart makes the objects that the overlays make, and takes no value that it does not know."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.arch.documents import names_in_first_column, section
from tests.deploy.render import ROOT, rendered
from tests.deploy.test_kubernetes_schemas import NEWEST, errors

CHART = ROOT / "k8s" / "chart"
HELM = Path(sys.executable).parent / "helm"
NAMESPACE = "pdserve"
_SETTINGS = {"max-model-len": 32768}
#: Values that make what an overlay makes.
CASES: dict[str, dict[str, Any]] = {
    "base": {},
    "gpu": {"gpu": {"enabled": True}},
    "keda": {"autoscaling": {"enabled": True}},
    "own-secrets": {"secrets": {"create": False, "peerTls": "pdserve-peer-tls"}},
    "external-redis": {"redis": {"existingSecret": "pdserve-redis"}},
    "external-state": {"state": {"existingSecret": "pdserve-state"}},
    "monitoring": {"monitoring": {"enabled": True}},
    "kube-prometheus-stack": {"monitoring": {"enabled": True, "labels": {"release": "kube-prometheus-stack"}}},
    "example": {
        "model": {"source": "Qwen/Qwen3-8B"},
        "gpu": {"enabled": True},
        "images": {
            "router": {"repository": "registry.example:5000/pdserve-router", "tag": "2026-11-28"},
            "worker": {"repository": "registry.example:5000/pdserve-cuda", "tag": "2026-11-28"},
        },
        "prefill": {"settings": _SETTINGS},
        "decode": {"settings": {**_SETTINGS, "max-num-seqs": 128, "tensor-parallel-size": 2}},
        "storage": {"models": {"size": "40Gi", "accessMode": "ReadWriteMany"}},
        "autoscaling": {"enabled": True},
    },
}
#: Overlays whose objects come beside those of another one.
_ALONE = ("monitoring", "kube-prometheus-stack")
#: The overlay `own-secrets` has its certificates from cert-manager.
_OF_OTHERS = ("Certificate", "Issuer")
#: What Helm does with an object of the chart.
_NOTES = {
    "PersistentVolumeClaim": {"helm.sh/resource-policy": "keep"},
    "Job": {"helm.sh/hook": "test", "helm.sh/hook-delete-policy": "before-hook-creation"},
}
_MADE_HERE = {"app.kubernetes.io/managed-by", "helm.sh/chart"}


def template(values: dict[str, Any], directory: Path, *, namespace: str = NAMESPACE) -> str:
    """What `helm template` prints. Raises CalledProcessError."""
    path = directory / "values.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    command = [HELM, "template", "main", CHART, "--namespace", namespace, "--values", path]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _objects(text: str, namespace: str = NAMESPACE) -> dict[tuple[str, str], Any]:
    """The objects of a render by kind and name, without what names them by their content or their tool."""
    text = re.sub(r"\bpdserve-(model|router|settings|workers)-[a-z0-9]{10}\b", r"pdserve-\1", text)
    found = {}
    for each in filter(None, yaml.safe_load_all(text)):
        metadata = each["metadata"]
        assert metadata.pop("namespace", namespace) == namespace
        metadata["name"] = re.sub(r"^(pdserve-secrets|pdserve-smoke-test|pdserve-model)-.*", r"\1", metadata["name"])
        metadata["labels"] = {name: text for name, text in metadata.get("labels", {}).items() if name not in _MADE_HERE}
        notes = metadata.pop("annotations", {})
        if notes:
            assert notes == _NOTES[each["kind"]], metadata["name"]
        for subject in each.get("subjects", ()):
            assert subject.pop("namespace", namespace) == namespace
        for container in _containers(each):
            container["env"] = sorted(container.get("env", ()), key=lambda variable: str(variable["name"]))
            for name in ("volumeMounts", "ports"):
                container[name] = sorted(container.get(name, ()), key=json.dumps)
        if volumes := _pod(each).get("volumes"):
            volumes.sort(key=lambda volume: str(volume["name"]))
        if metadata["name"] == "pdserve-model" and each["kind"] == "ConfigMap":
            assert each["data"].pop("RELEASE")  # What makes the fetching Job another one.
        for file, content in each.get("data", {}).items() if "grafana_dashboard" in metadata["labels"] else ():
            path = f"dashboards/{file}"  # The renders have the path alone.
            if content == (ROOT / "k8s" / "monitoring" / path).read_text(encoding="utf-8"):
                each["data"][file] = path
        found[each["kind"], metadata["name"]] = each
    return found


def _pod(each: dict[str, Any]) -> dict[str, Any]:
    pod = each.get("spec", {}).get("template", {})
    return pod.get("spec", {}) if isinstance(pod, dict) else {}


def _containers(each: dict[str, Any]) -> list[dict[str, Any]]:
    return [*_pod(each).get("initContainers", ()), *_pod(each).get("containers", ())]


@pytest.mark.parametrize("overlay", CASES)
def test_the_chart_makes_the_objects_of_the_overlay(overlay: str, tmp_path: Path) -> None:
    namespace = "llm" if overlay == "example" else NAMESPACE
    made = _objects(template(CASES[overlay], tmp_path, namespace=namespace), namespace)
    expected = {key: each for key, each in _objects(rendered(overlay), namespace).items() if key[0] not in _OF_OTHERS}
    if overlay in _ALONE:
        made = {key: each for key, each in made.items() if key not in _objects(rendered("base"))}
    assert made.keys() == expected.keys()
    for key, each in expected.items():
        assert made[key] == each, key


def test_helm_keeps_the_volumes_and_runs_the_smoke_test_as_a_test(tmp_path: Path) -> None:
    metadata = [
        (each["kind"], each["metadata"])
        for each in filter(None, yaml.safe_load_all(template({}, tmp_path)))
        if each["kind"] == "PersistentVolumeClaim" or each["metadata"]["name"].startswith("pdserve-smoke-test")
    ]
    assert {kind for kind, _ in metadata} == _NOTES.keys()
    for kind, each in metadata:
        assert each["annotations"] == _NOTES[kind], each["name"]


OTHERS: dict[str, Any] = {
    "images": {"redis": {"digest": "sha256:" + "a" * 64}, "pullSecrets": ["registry"]},
    "router": {"settings": {"max-body": "1MiB"}, "resources": {"limits": {"memory": "1Gi"}}},
    "prefill": {"replicas": 3, "nodeSelector": {"pool": "cpu"}},
    "decode": {
        "settings": {
            "kv-cache-memory": "8GiB",
            "max-model-len": 1_000_000,
            "itl-budget-ms": 0.5,
            "deterministic": True,
        },
        "tolerations": [{"key": "pool", "operator": "Exists"}],
    },
    "storage": {"models": {"existingClaim": "weights"}, "state": {"size": "20Gi", "storageClass": "fast"}},
    "networkPolicies": {"enabled": False},
    "monitoring": {"enabled": True, "dashboards": False},
}


def test_all_other_values_are_used(tmp_path: Path) -> None:
    objects = _objects(template(OTHERS, tmp_path))
    for each in objects.values():
        assert not errors(each, NEWEST), each["metadata"]["name"]
    assert not [kind for kind, _ in objects if kind == "NetworkPolicy"]
    assert ("PersistentVolumeClaim", "pdserve-models") not in objects
    assert ("ConfigMap", "pdserve-dashboard-cluster") not in objects
    claim = objects["PersistentVolumeClaim", "pdserve-state"]["spec"]
    assert (claim["resources"]["requests"]["storage"], claim["storageClassName"]) == ("20Gi", "fast")
    router, prefill, decode = (
        objects[key]["spec"]
        for key in (
            ("Deployment", "pdserve-router"),
            ("StatefulSet", "pdserve-prefill"),
            ("StatefulSet", "pdserve-decode"),
        )
    )
    pods = {name: spec["template"]["spec"] for name, spec in {"r": router, "p": prefill, "d": decode}.items()}
    assert (prefill["replicas"], pods["p"]["nodeSelector"]) == (3, {"pool": "cpu"})
    assert pods["d"]["tolerations"] == [{"key": "pool", "operator": "Exists"}]
    assert all(pod["imagePullSecrets"] == [{"name": "registry"}] for pod in pods.values())
    claims = {volume["persistentVolumeClaim"]["claimName"] for pod in pods.values() for volume in _claims(pod)}
    assert claims == {"weights"}
    [container] = pods["r"]["containers"]
    assert {"name": "PDSERVE_ROUTER__MAX_BODY", "value": "1MiB"} in container["env"]
    assert (container["resources"]["limits"], container["resources"]["requests"]["cpu"]) == ({"memory": "1Gi"}, "250m")
    settings = objects["ConfigMap", "pdserve-settings"]["data"]
    assert {
        name: settings[f"PDSERVE_DECODE__{name}"] for name in ("MAX_MODEL_LEN", "ITL_BUDGET_MS", "DETERMINISTIC")
    } == {
        "MAX_MODEL_LEN": "1000000",
        "ITL_BUDGET_MS": "0.5",
        "DETERMINISTIC": "true",
    }
    [redis] = _containers(objects["Deployment", "pdserve-redis"])
    assert redis["image"] == f"redis@{OTHERS['images']['redis']['digest']}"


#: Each value is found in the render, whatever else is there.
MARKED: dict[str, Any] = {
    "model": {"source": "org/name@revision-1", "directory": "directory-1", "name": "name-1"},
    "images": {
        "router": {"digest": "sha256:" + "b" * 64},
        "worker": {"digest": "sha256:" + "c" * 64},
        "redis": {"repository": "registry/redis", "tag": "7.4.99"},
    },
    "router": {"nodeSelector": {"pool": "routers"}, "tolerations": [{"key": "of-routers"}]},
    "prefill": {"resources": {"limits": {"memory": "31Gi"}}, "tolerations": [{"key": "of-prefill"}]},
    "decode": {"replicas": 33, "resources": {"limits": {"memory": "32Gi"}}, "nodeSelector": {"pool": "decoders"}},
    "storage": {
        "models": {"size": "11Gi", "storageClass": "class-1", "accessMode": "ReadWriteMany"},
        "redis": {"size": "12Gi", "storageClass": "class-2"},
        "state": {"size": "13Gi", "storageClass": "class-3"},
    },
}
SCALED: dict[str, Any] = {
    "autoscaling": {
        "enabled": True,
        "prometheus": "http://prometheus.test",
        "router": {"min": 41, "max": 42},
        "prefill": {"min": 43, "max": 44},
        "decode": {"min": 45, "max": 46},
    },
    "gpu": {"enabled": True},
    "decode": {
        "settings": {"tensor-parallel-size": 2, "drain-timeout-s": 300},
        "resources": {"requests": {"memory": "128Gi"}, "limits": {"memory": "128Gi"}},
    },
}


@pytest.mark.parametrize("values", [MARKED, SCALED], ids=["marked", "scaled"])
def test_each_value_reaches_an_object(values: dict[str, Any], tmp_path: Path) -> None:
    text = template(values, tmp_path)

    def leaves(value: Any) -> set[str]:
        children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        return set().union(*map(leaves, children)) if children else {str(value)}

    missing = {each for each in leaves(values) - {"True"} if not re.search(rf"\b{re.escape(each)}\b", text)}
    assert missing == set()


def test_resources_of_ones_own_leave_a_worker_its_gpus_and_threads(tmp_path: Path) -> None:
    pod = _pod(_objects(template(SCALED, tmp_path))["StatefulSet", "pdserve-decode"])
    [worker] = pod["containers"]
    amounts = {"cpu": "8", "memory": "128Gi", "nvidia.com/gpu": "2"}
    assert worker["resources"] == {"requests": amounts, "limits": amounts}
    assert pod["terminationGracePeriodSeconds"] == 330


@pytest.mark.parametrize("given", [{"file": '[keys.first]\nsha256 = "00"\n'}, {"existingSecret": "ours"}])
def test_keys_may_come_from_a_file_of_ones_own(given: dict[str, str], tmp_path: Path) -> None:
    objects = _objects(template({"keys": given}, tmp_path))
    pod = _pod(objects["Deployment", "pdserve-router"])
    [container] = pod["containers"]
    [argument] = [each for each in container["args"] if each.startswith("--api-keys-file")]
    [mount] = [each for each in container["volumeMounts"] if each["name"] == "keys"]
    [volume] = [each for each in pod["volumes"] if each["name"] == "keys"]
    assert argument == f"--api-keys-file={mount['mountPath']}/api-keys.toml"
    assert volume["secret"]["secretName"] == given.get("existingSecret", "pdserve-keys")
    [secrets] = [each["secret"]["items"] for each in pod["volumes"] if each["name"] == "secrets"]
    assert "api-keys.toml" not in [item["key"] for item in secrets]  # Who makes the other Secret needs none there.
    made = objects.get(("Secret", "pdserve-keys"))
    assert (made and made["stringData"]) == ({"api-keys.toml": given["file"]} if "file" in given else None)
    assert not errors(objects["Deployment", "pdserve-router"], NEWEST)


def _claims(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return [volume for volume in pod["volumes"] if "persistentVolumeClaim" in volume]


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"decode": {"replica": 3}}, "replica"),
        ({"decode": {"settings": {"--max-model-len": 1}}}, "max-model-len"),
        ({"storage": {"models": {"size": "a lot"}}}, "size"),
        ({"images": {"redis": {"digest": "7.4.6"}}}, "digest"),
        ({"model": {"source": ""}}, "source"),
        ({"router": {"settings": {"state-url": "redis://x"}}}, "state-url"),
        ({"decode": {"settings": {"http-port": 1}}}, "http-port"),
    ],
)
def test_a_wrong_value_is_refused_by_name(values: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError) as refused:
        template(values, tmp_path)
    assert named in refused.value.stderr


def test_another_setting_is_another_config_and_another_image_another_job(tmp_path: Path) -> None:
    before = template({}, tmp_path)
    settings = template({"decode": {"settings": {"max-model-len": 512}}}, tmp_path)
    release = template({"images": {"router": {"tag": "0.2.1"}, "worker": {"tag": "0.2.1"}}}, tmp_path)
    name = re.compile(r"^  name: (pdserve-(?:settings|model|secrets)-[a-z0-9]{10})$", re.MULTILINE)
    same = {*name.findall(before)}
    assert len(same) == 4  # The model's Job and ConfigMap have names of their own.
    assert len(same & {*name.findall(settings)}) == 3
    assert not any("model" in each or "secrets" in each for each in same & {*name.findall(release)})
    # Of a Job that exists, nothing of a pod can be changed.
    secret = template({"images": {"pullSecrets": ["registry"]}}, tmp_path)
    jobs = [{each for each in name.findall(text) if "settings" not in each} for text in (before, secret)]
    assert len(jobs[0] & jobs[1]) == 1  # The ConfigMap.


def test_the_package_is_the_chart(tmp_path: Path) -> None:
    """Its files are links to those of the kustomizations."""
    subprocess.run([HELM, "package", CHART, "--destination", tmp_path], check=True, capture_output=True)
    [package] = tmp_path.glob("pdserve-*.tgz")
    command = [HELM, "template", "main", package, "--namespace", NAMESPACE]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == template({}, tmp_path)
    subprocess.run([HELM, "lint", "--strict", CHART], check=True, capture_output=True)


def _paths(values: dict[str, Any], prefix: str = "") -> set[str]:
    """The paths of all values; a mapping without keys is one."""
    found = set()
    for name, value in values.items():
        found |= _paths(value, f"{prefix}{name}.") if isinstance(value, dict) and value else {prefix + name}
    return found


def test_every_value_is_in_the_schema_and_on_the_page() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    jsonschema.Draft7Validator(schema).validate(values)

    def known(node: dict[str, Any], prefix: str = "") -> set[str]:
        node = schema["definitions"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node
        if "properties" not in node:
            return {prefix.removesuffix(".")}
        return {path for name, each in node["properties"].items() for path in known(each, f"{prefix}{name}.")}

    assert known(schema) - {"global"} == _paths(values)
    documented = names_in_first_column(section("docs/operations/helm.md", "Values"))
    assert {path for name in documented for path in _expanded(name)} == _paths(values)


def _expanded(name: str) -> set[str]:
    """The paths of a row: TIER stands for each tier, and IMAGE for each image."""
    for word, all_of in {"TIER": ("router", "prefill", "decode"), "IMAGE": ("router", "worker", "redis")}.items():
        if word in name:
            return {name.replace(word, each) for each in all_of}
    return {name}
