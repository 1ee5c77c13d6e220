"""Every object is valid for the oldest and the newest supported version, without unknown fields."""

from __future__ import annotations

import importlib.resources
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import referencing

from tests.arch.documents import read
from tests.deploy.manifests import NAMES, documents, title
from tests.deploy.test_kubernetes_workloads import ALLOWED_KINDS

OLDEST, NEWEST = "1.30", "1.37"
#: Overlays that need a newer version than the base.
OLDEST_OF = {"models-image": "1.35", "same-pod-gpu": "1.34"}
#: Our own schemas, of the fields that our objects have.
CUSTOM = {path.stem for path in (Path(__file__).parent / "schemas").glob("*.json")}
_SCHEMAS = importlib.resources.files("kubernetes_validate") / "kubernetes-json-schema"


@cache
def _definitions(version: str) -> referencing.Registry[Any]:
    definitions = json.loads((_SCHEMAS / f"v{version}.0-local-strict/_definitions.json").read_text(encoding="utf-8"))
    return referencing.Resource.from_contents(definitions) @ referencing.Registry()


@cache
def _validator(version: str, kind: str, api: str) -> jsonschema.protocols.Validator:
    if kind.lower() in CUSTOM:
        schema = json.loads((Path(__file__).parent / f"schemas/{kind.lower()}.json").read_text(encoding="utf-8"))
        return jsonschema.Draft202012Validator(schema)
    group, _, number = api.rpartition("/")
    name = "-".join(filter(None, (kind.lower(), group.split(".")[0], number)))
    schema = json.loads((_SCHEMAS / f"v{version}.0-local-strict/{name}.json").read_text(encoding="utf-8"))
    return jsonschema.Draft202012Validator(schema, registry=_definitions(version))


def errors(document: dict[str, Any], version: str) -> list[str]:
    validator = _validator(version, document["kind"], document["apiVersion"])
    return [f"{title(document)} {error.json_path}: {error.message}" for error in validator.iter_errors(document)]


@pytest.mark.parametrize("version", [OLDEST, *OLDEST_OF.values(), NEWEST])
def test_every_object_is_valid(version: str) -> None:
    names = [name for name in NAMES if OLDEST_OF.get(name, OLDEST) <= version]
    # Most objects are the same in several renders.
    distinct = {json.dumps(document, sort_keys=True): document for name in names for document in documents(name)}
    found = [error for document in distinct.values() for error in errors(document, version)]
    assert found == []


def test_unknown_and_wrong_fields_are_found() -> None:
    [router] = [each for each in documents("base") if title(each) == "Deployment/pdserve-router"]
    broken = json.loads(json.dumps(router))
    broken["spec"]["template"]["spec"]["containers"][0]["livenesProbe"] = {}
    broken["spec"]["replicas"] = "two"
    assert len(errors(broken, OLDEST)) == 2
    [scaled, *_] = [each for each in documents("keda") if each["kind"] == "ScaledObject"]
    assert errors({**scaled, "spec": {**scaled["spec"], "idle": 1}}, OLDEST) != []


def test_the_pod_templates_of_custom_objects_are_valid() -> None:
    for document in documents("disaggregatedset"):
        if document["kind"] == "DisaggregatedSet":
            for role in document["spec"]["roles"]:
                template = role["spec"]["leaderWorkerTemplate"]["workerTemplate"]
                pod = {"apiVersion": "v1", "kind": "Pod", **template}
                pod["metadata"] = {"name": role["name"], **template["metadata"]}
                assert errors(pod, OLDEST) + errors(pod, NEWEST) == []


def test_every_custom_kind_has_a_schema_and_every_schema_is_used() -> None:
    kinds = {document["kind"].lower() for name in NAMES for document in documents(name)}
    assert kinds >= CUSTOM
    assert kinds <= {kind.lower() for kind in ALLOWED_KINDS}


def test_the_page_names_the_supported_versions() -> None:
    page = read("docs/operations/kubernetes.md")
    assert f"Kubernetes {OLDEST} to {NEWEST}" in page
    for name, version in OLDEST_OF.items():
        assert re.search(rf"^\| `{name}` \|.*Kubernetes {version}", page, re.MULTILINE)
