"""`make audit`: known vulnerabilities of the pinned packages, as an advisory service reports them, and of images.

A service that cannot be reached, or knows no advisories, as mirrors of the package index do not, makes the audit
`skipped`, never clean: the vulnerabilities of an old release that nothing here needs are asked for, too.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.dependencies.images import named_images, problems
from tests.dependencies.pins import pinned

#: A release with many published vulnerabilities. It is asked about, and never installed.
CANARY = ("django", "1.2")
SERVICES = ("osv", "pypi")
#: Vulnerabilities that pdserve cannot meet, by id, with the reason. An entry is removed with the version that fixes it.
ACCEPTED: Mapping[str, str] = {}
_TIMEOUT_S = 120


class NotAudited(Exception):
    """The service has not answered, with the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vulnerability:
    """A published vulnerability of a pinned version."""

    package: str
    ids: tuple[str, ...]
    #: Releases that fix it; empty: none does.
    fixed_in: tuple[str, ...]

    @property
    def fails(self) -> bool:
        """Whether it has to be dealt with now."""
        return bool(self.fixed_in) and not set(self.ids) & ACCEPTED.keys()

    def __str__(self) -> str:
        fix = f"fixed in {', '.join(self.fixed_in)}" if self.fixed_in else "no release fixes it"
        reason = next((f"; accepted: {ACCEPTED[each]}" for each in self.ids if each in ACCEPTED), "")
        return f"{self.package}: {' = '.join(self.ids)}, {fix}{reason}"


def vulnerabilities(report: Mapping[str, Any]) -> list[Vulnerability]:
    """What a report of pip-audit in JSON lists. Raises `NotAudited` if its service knows no advisories."""
    answered = [each for each in report["dependencies"] if "vulns" in each]
    canary = [each for each in answered if each["name"] == CANARY[0]]
    if not canary or not canary[0]["vulns"]:
        raise NotAudited(f"it knows no vulnerability of {' '.join(CANARY)}, so it has no advisories")
    missing = len(report["dependencies"]) - len(answered)
    if missing:
        raise NotAudited(f"it does not know {missing} of {len(report['dependencies'])} packages")
    return [
        Vulnerability(
            package=f"{each['name']} {each['version']}",
            ids=(found["id"], *found.get("aliases", ())),
            fixed_in=tuple(found["fix_versions"]),
        )
        for each in answered
        if each["name"] != CANARY[0]
        for found in each["vulns"]
    ]


def ask(service: str, packages: Mapping[str, str], options: Sequence[str] = ()) -> Mapping[str, Any]:
    """The report of pip-audit. Raises `NotAudited`."""
    command = [sys.executable, "-m", "pip_audit", "--no-deps", "--disable-pip", "--format", "json", "--timeout", "15"]
    with tempfile.TemporaryDirectory() as directory:
        requirements = Path(directory) / "requirements.txt"
        requirements.write_text("".join(f"{name}=={version}\n" for name, version in packages.items()), "utf-8")
        command += ["--progress-spinner", "off", "--cache-dir", directory, "-s", service, "-r", str(requirements)]
        try:
            done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            raise NotAudited(f"no answer within {_TIMEOUT_S} s") from None
    try:
        report: Mapping[str, Any] = json.loads(done.stdout)
    except ValueError:
        lines = done.stderr.strip().splitlines()
        raise NotAudited(lines[-1][:120] if lines else "no answer") from None
    return report


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 1 if a vulnerability has a fix, else 0: also if no service answers for the packages."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--osv-url", help="URL of another service that speaks OSV's API")
    options = parser.parse_args(argv)
    old_images = problems(list(named_images()))
    for problem in old_images:
        print(f"audit: {problem}")
    return max(int(bool(old_images)), audit_packages(options.osv_url))


def audit_packages(osv_url: str | None) -> int:
    """Returns 1 if a vulnerability of a package has a fix, else 0. `osv_url`: of another service."""
    packages = {**pinned(), CANARY[0]: CANARY[1]}
    reasons = []
    for service in ("osv",) if osv_url else SERVICES:
        try:
            found = vulnerabilities(ask(service, packages, ["--osv-url", osv_url] if osv_url else ()))
        except NotAudited as error:
            reasons.append(f"{service}: {error}")
            continue
        for each in found:
            print(f"audit: {each}")
        failing = sum(each.fails for each in found)
        counts = f"{len(packages) - 1} packages, {len(found)} known vulnerabilities, {failing} to be fixed"
        print(f"audit: {counts} ({service})")
        return 1 if failing else 0
    print(f"audit: skipped ({'; '.join(reasons)})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
