"""No image that a stack of ours starts has a vulnerability that was known and fixed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dependencies import audit, images
from tests.dependencies.images import FIXED_IN, Image, named_images, problems


def test_images_have_full_versions_without_a_known_vulnerability() -> None:
    assert problems(list(named_images())) == []


def test_every_image_of_the_table_is_in_use() -> None:
    assert {each.name for each in named_images()} == FIXED_IN.keys()
    users = {each.area for each in named_images() if each.name == "redis"}
    assert users == {"compose", "k8s"}


@pytest.mark.parametrize(
    ("name", "tag", "words"),
    [
        ("redis", "7.4.2-bookworm", "compose/x.yaml: redis:7.4.2-bookworm has CVE-2025-49844, fixed in 7.4.6"),
        ("redis", "7.4-alpine", "not a full version"),
        ("redis", "latest", "not a full version"),
        ("redis", "", "not a full version"),
        ("valkey/valkey", "8.1.4", "without a least version"),
    ],
)
def test_an_old_a_floating_and_an_unknown_version_are_named(name: str, tag: str, words: str) -> None:
    [problem] = problems([Image(file=Path("compose/x.yaml"), name=name, tag=tag)])
    assert words in problem
    assert problems([Image(file=Path("compose/x.yaml"), name="prom/prometheus", tag="v2.55.1")]) == []


def test_the_audit_fails_for_an_image(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def no_answer(*arguments: object) -> None:
        raise audit.NotAudited("no answer")

    monkeypatch.setattr(audit, "ask", no_answer)
    assert audit.main([]) == 0
    monkeypatch.setitem(images.FIXED_IN, "redis", ("99.0.0", "CVE-2099-1"))  # type: ignore[arg-type]
    assert audit.main([]) == 1
    assert "has CVE-2099-1, fixed in 99.0.0" in capsys.readouterr().out
