"""No installation that `pyproject.toml` or `constraints.txt` allows has a vulnerability that was known and fixed.

`make audit` knows more, where an advisory service can be reached. This list is what it was when it was last seen.
"""

from __future__ import annotations

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.dependencies.pins import pinned, project

#: The first release without the vulnerability, which is the latest of the package.
FIXED_IN = {
    "aiohttp": ("3.14.3", "CVE-2026-69244"),
    "cryptography": ("50.0.0", "CVE-2026-69247"),
    "filelock": ("3.20.3", "CVE-2026-22701"),
    "fonttools": ("4.60.2", "CVE-2025-66034"),
    "h11": ("0.16.0", "CVE-2025-43859"),
    "idna": ("3.15", "CVE-2026-45409"),
    "jinja2": ("3.1.6", "CVE-2025-27516"),
    "pillow": ("12.3.0", "GHSA-6r8x-57c9-28j4"),
    "protobuf": ("6.33.5", "CVE-2026-0994"),
    "pygments": ("2.20.0", "CVE-2026-4539"),
    "pytest": ("9.0.3", "CVE-2025-71176"),
    "requests": ("2.33.0", "CVE-2026-25645"),
    "setuptools": ("78.1.1", "CVE-2025-47273"),
    "torch": ("2.10.0", "CVE-2026-24747"),
    "urllib3": ("2.7.0", "CVE-2026-44431"),
}


def lower_bound(requirement: Requirement) -> Version:
    """The lowest version that the requirement allows."""
    bounds = [Version(each.version) for each in requirement.specifier if each.operator in (">=", "==", "~=")]
    return max(bounds, default=Version("0"))


@pytest.mark.parametrize("name", FIXED_IN)
def test_no_allowed_version_has_a_known_vulnerability(name: str) -> None:
    fixed, advisory = Version(FIXED_IN[name][0]), FIXED_IN[name][1]
    for pin, version in pinned().items():
        assert canonicalize_name(pin) != name or Version(version) >= fixed, f"{pin} {version} has {advisory}"
    for extra, requirements in project().items():
        for requirement in map(Requirement, requirements):
            if canonicalize_name(requirement.name) == name:
                assert lower_bound(requirement) >= fixed, f"{extra}: {requirement} allows {advisory}"
