"""The images of others that compose/ and k8s/ name: their full versions, and the least ones that they may have.

Which vulnerabilities an image has is not asked anywhere; the table is what was known when it was last seen.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from packaging.version import Version

from tests.dependencies.pins import ROOT

#: The first version without the vulnerability, which is the latest that was known of the image.
FIXED_IN: Mapping[str, tuple[str, str]] = {
    "grafana/grafana": ("11.6.4", "CVE-2025-6023"),
    "jaegertracing/all-in-one": ("1.47.0", "CVE-2023-36656"),
    "otel/opentelemetry-collector": ("0.102.1", "CVE-2024-36129"),
    "prom/prometheus": ("2.40.4", "CVE-2022-46146"),
    "python": ("3.11.14", "CVE-2025-8194"),
    "redis": ("7.4.6", "CVE-2025-49844"),
}
OWN = "pdserve"
#: In a manifest; the tag may be in a kustomization.
_CONTAINER = re.compile(r"^[ -]*image: (?P<name>[\w./-]+)(?::(?P<tag>[\w.+-]+))?$", re.MULTILINE)
#: The default of a variable or of an argument.
_DEFAULT = re.compile(r"_IMAGE(?::-|=)(?P<name>[\w./-]+):(?P<tag>[\w.+-]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """An image as a file names it."""

    #: Relative to the repository.
    file: Path
    name: str
    tag: str

    @property
    def reference(self) -> str:
        """Name and tag."""
        return f"{self.name}:{self.tag}"

    @property
    def area(self) -> str:
        """`compose` or `k8s`."""
        return str(self.file).partition("/")[0]

    @property
    def problem(self) -> str | None:
        """Why it may not be used; None if it may."""
        where, full = f"{self.file}: {self.name}:{self.tag}", re.match(r"v?(\d+\.\d+\.\d+)", self.tag)
        if full is None:
            return f"{where} is not a full version"
        if self.name not in FIXED_IN:
            return f"{where} is an image without a least version. Add it to {__name__}"
        version, advisory = FIXED_IN[self.name]
        return f"{where} has {advisory}, fixed in {version}" if Version(full[1]) < Version(version) else None


def named_images() -> Iterator[Image]:
    """The images of others in compose/ and k8s/."""
    for name, tag, path in (*_in_compose(), *_in_manifests(), *_in_kustomizations()):
        if not name.rpartition("/")[2].startswith(OWN):
            yield Image(file=path.relative_to(ROOT), name=name, tag=tag)


def _in_compose() -> Iterator[tuple[str, str, Path]]:
    for path in sorted((ROOT / "compose").iterdir()):
        if path.is_file():
            for found in _DEFAULT.finditer(path.read_text(encoding="utf-8")):
                yield found["name"], found["tag"], path


def _sources(pattern: str) -> Iterator[Path]:
    """The files of k8s/ that are not made from others."""
    k8s = ROOT / "k8s"
    return (path for path in sorted(k8s.rglob(pattern)) if k8s / "rendered" not in path.parents)


def _in_kustomizations() -> Iterator[tuple[str, str, Path]]:
    for path in _sources("kustomization.yaml"):
        for image in yaml.safe_load(path.read_text(encoding="utf-8")).get("images", ()):
            if "newTag" in image:
                yield image.get("newName", image["name"]), str(image["newTag"]), path


def _in_manifests() -> Iterator[tuple[str, str, Path]]:
    """Without those that a kustomization gives a tag."""
    tagged = {name for name, _, _ in _in_kustomizations()}
    for path in _sources("*.yaml"):
        for found in _CONTAINER.finditer(path.read_text(encoding="utf-8")):
            if found["tag"] or found["name"] not in tagged:
                yield found["name"], found["tag"] or "", path


def problems(images: Sequence[Image]) -> list[str]:
    """What has to be dealt with now."""
    return [each.problem for each in images if each.problem is not None]
