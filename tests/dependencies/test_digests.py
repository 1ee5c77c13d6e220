"""Images of others are pinned by what their registries say, all or none."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
import yaml

from tests.dependencies.digests import main, variables
from tests.dependencies.images import named_images

#: In place of the engine's command: a digest for each reference but one, which the test names.
_DOCKER = """#!/bin/sh
for reference; do :; done
[ "$reference" = "$MISSING" ] && { echo "ERROR: $reference: not found" >&2; exit 1; }
echo "{\\"digest\\": \\"sha256:$(printf %s "$reference" | sha256sum | cut -d ' ' -f 1)\\"}"
"""


@pytest.fixture(autouse=True)
def _docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = tmp_path / "bin" / "docker"
    command.parent.mkdir()
    command.write_text(_DOCKER)
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{command.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("MISSING", "")


def _digest(reference: str) -> str:
    return "sha256:" + hashlib.sha256(reference.encode()).hexdigest()


def test_compose_and_kustomize_get_the_digest_of_each_image(tmp_path: Path) -> None:
    assert main(["--out", str(tmp_path)]) == 0
    lines = dict(line.split("=") for line in (tmp_path / "images.env").read_text().splitlines())
    assert lines == {name: f"{reference}@{_digest(reference)}" for name, reference in variables().items()}
    assert {reference for _, reference in variables().items()} == {
        each.reference for each in named_images() if each.area == "compose"
    }
    component = yaml.safe_load((tmp_path / "images" / "kustomization.yaml").read_text())
    [redis] = component["images"]
    [tag] = {each.tag for each in named_images() if each.name == "redis" and each.area == "k8s"}
    assert redis == {"name": "redis", "digest": _digest(f"redis:{tag}")}


def test_where_a_registry_does_not_answer_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = variables()["GRAFANA_IMAGE"]
    monkeypatch.setenv("MISSING", missing)
    out = tmp_path / "out"
    assert main(["--out", str(out)]) == 1
    assert f"{missing}: ERROR: {missing}: not found" in capsys.readouterr().err
    assert not out.exists()


def test_without_the_command_the_error_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["--out", str(tmp_path / "out")]) == 1
    assert "docker" in capsys.readouterr().err
