"""The list of tests that passed only when they were repeated."""

from __future__ import annotations

import pytest

from tests.arch.documents import ROOT
from tests.unstable import FILE, LIMIT, read, too_often

ENTRY = '{ test = "tests/a.py::test_x", date = "2026-11-27", symptom = "TimeoutError", processor = "P", count = %d },'


def test_the_list_is_readable_and_names_tests_that_exist() -> None:
    for sighting in read(FILE.read_text("utf-8")):
        file, _, name = sighting.test.partition("::")
        assert f"def {name.partition('[')[0].rpartition('::')[2]}(" in (ROOT / file).read_text("utf-8")


def test_three_sightings_of_one_test_are_too_many() -> None:
    once, twice = ENTRY % 1, ENTRY % 2
    assert too_often(read(f"seen = [{twice}]")) == {}
    assert too_often(read(f"seen = [{once}{twice}]")) == {"tests/a.py::test_x": LIMIT}


@pytest.mark.parametrize("entry", ["{ test = 1 },", ENTRY.replace("2026-11-27", "today") % 1])
def test_an_entry_with_other_fields_is_refused(entry: str) -> None:
    with pytest.raises((TypeError, ValueError)):
        read(f"seen = [{entry}]")
