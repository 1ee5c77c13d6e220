"""`kubectl apply` over a running cluster: what cannot be changed is as in the manifests before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.manifests import LOADER, NAMES, Object, documents

#: Fields that cannot be changed, by kind. Jobs are in test_kubernetes_jobs.py.
FIXED = {
    "DaemonSet": ("selector",),
    "Deployment": ("selector",),
    "PersistentVolumeClaim": ("accessModes", "storageClassName"),
    "StatefulSet": ("podManagementPolicy", "selector", "serviceName", "volumeClaimTemplates"),
}
#: Those of each object of version 0.2. An object that is new here is added; a value that changes is a cluster that
#: has to be made anew, which is then said in the changelog.
KNOWN = Path(__file__).parent / "data/fixed-fields.yaml"
#: An overlay of one's own, whose volume is of its own, too.
OWN = {"example"}


def fixed(document: Object) -> Object:
    """The fields of an object that cannot be changed."""
    spec = document["spec"]
    return {field: spec[field] for field in FIXED[document["kind"]] if field in spec}


def known() -> dict[str, dict[str, Any]]:
    content: dict[str, dict[str, Any]] = yaml.load(KNOWN.read_text(encoding="utf-8"), LOADER)
    return content


@pytest.mark.parametrize("name", sorted(set(NAMES) - OWN))
def test_nothing_that_is_fixed_changes(name: str) -> None:
    expected = known()
    for document in documents(name):
        if document["kind"] in FIXED:
            assert fixed(document) == expected[document["kind"]][document["metadata"]["name"]]


def test_no_object_that_is_known_is_gone() -> None:
    """Its successor would run next to it: `kubectl apply` deletes nothing."""
    found = {(each["kind"], each["metadata"]["name"]) for name in NAMES for each in documents(name)}
    assert {(kind, name) for kind, names in known().items() for name in names} <= found
