"""The packages that are pinned, and which installation needs each."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
#: Installations in the order in which a package is counted: what is in the first one is in those after it, too.
INSTALLATIONS: Mapping[str, tuple[str, ...]] = {
    "router": (),
    "workers": ("cpu", "cuda12", "cuda13"),
    "traces": ("otel",),
    "development": ("dev", "bench"),
}
BUILD = "build"
#: Twins of packages that are installed here: the same for another CUDA.
_TWINS = ("-cu12", "-cu13")


def pinned() -> dict[str, str]:
    """Version by name, as `constraints.txt` has them."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def project() -> Mapping[str, list[str]]:
    """Requirements by extra; those of the base installation are under the empty name."""
    content = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras: Mapping[str, list[str]] = content["project"]["optional-dependencies"]
    return {"": content["project"]["dependencies"], BUILD: content["build-system"]["requires"], **extras}


def distribution(name: str) -> metadata.Distribution | None:
    """The installed package; for one that only another CUDA takes, its twin. None if there is neither."""
    twin = name.replace(*_TWINS) if name.endswith(_TWINS[0]) else name.replace(*_TWINS[::-1])
    for each in (name, twin):
        try:
            return metadata.distribution(each)
        except metadata.PackageNotFoundError:
            continue
    return None


def is_as_pinned() -> bool:
    """Whether everything that is pinned is installed here in that version, tools of the build excepted."""
    tools = {canonicalize_name(Requirement(each).name) for each in project()[BUILD]}
    for name, version in pinned().items():
        found = distribution(name)
        if canonicalize_name(name) not in tools and (found is None or found.version.partition("+")[0] != version):
            return False
    return True


def installations() -> dict[str, str]:
    """The first installation that takes each package, by canonical name. Needs the packages to be installed."""
    declared, found = project(), dict[str, str]()
    for installation, extras in INSTALLATIONS.items():
        required = [*declared[""], *(each for extra in extras for each in declared[extra])]
        for name in _closure(required):
            found.setdefault(name, installation)
    for requirement in declared[BUILD]:
        found.setdefault(canonicalize_name(Requirement(requirement).name), BUILD)
    return found


def _closure(requirements: Iterable[str]) -> Iterator[str]:
    """Names of the packages that these take, with what those take in turn."""
    waiting, seen = [Requirement(each) for each in requirements], set[tuple[str, str]]()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        for extra in ("", *sorted(requirement.extras)):
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            found = distribution(name)
            more = [] if found is None else [Requirement(each) for each in found.requires or ()]
            if name.endswith(_TWINS[0]):
                more = [Requirement(str(each).replace(_TWINS[1], _TWINS[0])) for each in more]
            waiting += [each for each in more if each.marker is None or each.marker.evaluate({"extra": extra})]
        yield name
