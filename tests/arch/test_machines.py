"""Every test file that is more thorough at full depth belongs to a row of `tests.machines` with that depth."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from tests.arch.documents import ROOT
from tests.machines import Row, rows

DEPTH = "PDSERVE_TEST_DEPTH"
_READS_DEPTH = re.compile(rf"\bIS_FULL\b|\bexamples_on\b|{DEPTH}")
_NAMED_ROW = re.compile(r"make test-all ARGS=([\w-]+)")


def _read_depth() -> Iterator[str]:
    """Files of tests that read the depth, without what all of them share."""
    for path in sorted((ROOT / "tests").rglob("*.py")):
        name = str(path.relative_to(ROOT))
        is_shared = name.startswith(("tests/support/", "tests/arch/")) or name == "tests/machines.py"
        if not is_shared and _READS_DEPTH.search(path.read_text(encoding="utf-8")):
            yield name


def _runs(row: Row, name: str) -> bool:
    """Whether the row runs this file at full depth."""
    return row.environment.get(DEPTH) == "full" and any(Path(name).is_relative_to(suite) for suite in row.suites)


def test_every_test_file_with_a_full_depth_is_in_a_row_that_runs_it() -> None:
    files = list(_read_depth())
    assert len(files) > 20
    assert [name for name in files if not any(_runs(row, name) for row in rows())] == []


def test_a_row_named_by_a_skipped_test_runs_it() -> None:
    known = {row.name: row for row in rows()}
    named = [(name, row) for name in _read_depth() for row in _NAMED_ROW.findall((ROOT / name).read_text("utf-8"))]
    assert len(named) > 5
    assert [(name, row) for name, row in named if row not in known or not _runs(known[row], name)] == []


def test_every_suite_of_a_row_exists() -> None:
    assert {suite for row in rows() for suite in row.suites if not (ROOT / suite.split("::")[0]).exists()} == set()


def test_every_row_is_documented() -> None:
    page = (ROOT / "docs/internals/machines.md").read_text("utf-8")
    names = (re.sub(r"^(instruction-set-).*", r"\1...", row.name) for row in rows())
    assert [name for name in names if f"| `{name}` |" not in page] == []
