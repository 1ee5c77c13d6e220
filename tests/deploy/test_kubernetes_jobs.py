"""Jobs cannot be changed once they exist: one that a new release, tag or model changes has another name."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.manifests import LOADER, MONITORS, NAMES, config_map, of_kind
from tests.deploy.render import K8S, render
from tests.support.tools import tool

EXAMPLE = "overlays/example/kustomization.yaml"


@pytest.mark.parametrize("name", sorted(set(NAMES) - MONITORS))
def test_the_name_of_a_job_follows_its_release(name: str) -> None:
    for job in of_kind(name, "Job"):
        [container] = job["spec"]["template"]["spec"]["containers"]
        tag = container["image"].rpartition(":")[2]
        if job["metadata"]["labels"]["app.kubernetes.io/component"] == "fetch-model":
            settings = container["envFrom"][0]["configMapRef"]["name"]
            # The hash of a ConfigMap is that of what is in it.
            assert job["metadata"]["name"] == settings
            assert config_map(name, settings)["RELEASE"].endswith(f":{tag}")
        else:
            assert job["metadata"]["name"].endswith(f"-v{tag}")


def jobs_of(kubectl: Path, k8s: Path) -> dict[str, Any]:
    """The Jobs of the example, by name."""
    documents = yaml.load_all(render(kubectl, (k8s / EXAMPLE).parent), Loader=LOADER)
    return {each["metadata"]["name"]: each["spec"]["template"] for each in documents if each["kind"] == "Job"}


@pytest.mark.parametrize(
    ("old", "new", "renamed"),
    [
        ('newTag: "2026-11-28"', 'newTag: "2026-11-29"', {"model", "secrets", "smoke-test"}),
        ("MODEL_SOURCE=Qwen/Qwen3-8B", "MODEL_SOURCE=Qwen/Qwen3-8B@abc", {"model"}),
        ("TENSOR_PARALLEL_SIZE=2", "TENSOR_PARALLEL_SIZE=4", set()),
    ],
)
def test_a_job_that_changes_has_another_name(tmp_path: Path, old: str, new: str, renamed: set[str]) -> None:
    kubectl = tool("kubectl")
    shutil.copytree(K8S, tmp_path / "k8s")
    before, path = jobs_of(kubectl, tmp_path / "k8s"), tmp_path / "k8s" / EXAMPLE
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")
    after = jobs_of(kubectl, tmp_path / "k8s")
    assert all(before[name] == after[name] for name in before.keys() & after.keys())
    # `pdserve-`, what the Job does, and a tag or a hash.
    new_names = {name.removeprefix("pdserve-") for name in after.keys() - before.keys()}
    assert len(new_names) == len(renamed)
    assert all(any(name.startswith(f"{each}-") for name in new_names) for each in renamed)
