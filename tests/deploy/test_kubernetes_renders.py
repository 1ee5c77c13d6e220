"""What is in k8s/rendered is what kustomize makes of k8s/ today."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.deploy.manifests import LOADER, NAMES, documents
from tests.deploy.render import (
    K8S,
    MONITORING,
    RENDERED,
    ROOT,
    difference_of,
    digest,
    monitoring_files,
    overlays,
    patched,
    render,
    rendered_digest,
    sources,
    without_dashboards,
)
from tests.support.tools import tool


def test_every_overlay_was_rendered_after_its_last_change() -> None:
    assert sorted(path.stem for path in RENDERED.iterdir()) == NAMES
    stale = [name for name, directory in overlays().items() if rendered_digest(name) != digest(directory)]
    assert stale == [], "run `make render`"


def test_a_change_of_any_source_changes_the_digest() -> None:
    files = sources(K8S / "overlays/gpu")
    expected = {"overlays/gpu/kustomization.yaml", "components/gpu/worker.yaml", "components/gpu/decode.toml"}
    expected |= {"base/workers/decode.yaml", "base/workers/decode.toml", "base/front/router.toml"}
    assert expected <= {str(path.relative_to(K8S)) for path in files}


def test_every_file_of_k8s_is_in_a_render() -> None:
    used = set().union(*(sources(directory) for directory in overlays().values()))
    # Values for a chart of others, our own chart, rules and dashboards, from which files of the overlay are generated.
    others = {K8S / "components/hpa/adapter-rules.yaml", *RENDERED.rglob("*"), *MONITORING.rglob("rules/*")}
    others |= {*(K8S / "chart").rglob("*")}
    unused = {path for path in K8S.rglob("*") if path.is_file() and not path.name.startswith(".")} - used - others
    assert unused == set()


def test_generated_files_of_the_monitoring_overlay_are_those_of_its_rules_and_dashboards() -> None:
    for path, text in monitoring_files().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.relative_to(ROOT)}: run `make render`"


def test_overlays_are_kept_as_their_difference_from_the_base_and_dashboards_once() -> None:
    whole = {path.name for path in RENDERED.glob("*.yaml")}
    assert whole == {"base.yaml", "monitoring.yaml", "next-release.yaml"}
    assert '"panels"' not in (RENDERED / "monitoring.yaml").read_text(encoding="utf-8")
    assert '"panels"' in next(iter((MONITORING / "dashboards").glob("*.json"))).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("a\nb\nc\n", "a\nc\n"),
        ("a\nb\nc\n", "x\na\nb\nc\ny\n"),
        ("a\nb\nc\n", "a\nB\nb\nC\n"),
        ("a\n---\n- b\n", "a\n--- c\n+++ b\n"),
        ("a\n", "a\n"),
        ("", "a\n"),
        ("a\n", ""),
    ],
)
def test_a_difference_gives_the_new_text_back(old: str, new: str) -> None:
    assert patched(old, difference_of(old, new)) == new


def test_a_difference_from_another_text_is_refused() -> None:
    with pytest.raises(AssertionError, match="line 2"):
        patched("a\nx\n", difference_of("a\nb\n", "a\n"))


@pytest.fixture(scope="module")
def kubectl() -> Path:
    path = tool("kubectl")
    answer = subprocess.run([path, "version", "--client", "-o", "json"], capture_output=True, check=False, text=True)
    found = re.match(r"v(\d+)", json.loads(answer.stdout or "{}").get("kustomizeVersion", "v0"))
    if found is None or int(found[1]) < 5:
        pytest.skip("this kubectl has a kustomize older than version 5")
    return path


@pytest.mark.parametrize("name", NAMES)
def test_kustomize_renders_the_same_objects(kubectl: Path, name: str) -> None:
    text = without_dashboards(render(kubectl, overlays()[name]))
    now = [document for document in yaml.load_all(text, Loader=LOADER) if document]
    assert now == list(documents(name)), "run `make render`"
