"""Every promise, finding and advisory in the security pages names a test that exists and is collected, or a reason."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.arch.documents import ROOT, read, section, table_rows

PAGES = ("docs/security.md", "docs/internals/security-rows.md", "docs/internals/regressions.md")
_TEST = re.compile(r"`(tests/[\w/.]+\.py)::((?:\w+::)?\w+)(\[[^`]+\])?`")
#: What stands in the last column where no test is possible or needed.
_REASON = "Cannot occur: "
#: Sections of the second page, with the number of their rows, none of which may get lost.
SECTIONS = {"Findings of the review": 27, "Advisories of other servers": 40}
#: The same of the third page.
FAILURES = {"Handover and recovery": 29, "Continuation and migration": 13}


@cache
def _tests_in(path: Path) -> frozenset[str]:
    """Names of the tests that pytest collects from a file, as `name` or `Class::name`."""

    def collected(body: list[ast.stmt], prefix: str = "") -> Iterator[str]:
        for node in body:
            match node:
                # A state machine of Hypothesis, also within a mark.
                case ast.Assign(targets=[ast.Name(id=name)], value=made) if _is_machine(name, made):
                    yield prefix + name
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) if name.startswith("test_"):
                    marks = {ast.unparse(mark).partition("(")[0] for mark in node.decorator_list}
                    if not marks & {"pytest.mark.skip", "pytest.mark.xfail", "pytest.fixture"}:
                        yield prefix + name
                case ast.ClassDef(name=name) if name.startswith("Test"):
                    yield from collected(node.body, f"{name}::")

    return frozenset(collected(ast.parse(path.read_text(encoding="utf-8")).body))


def _is_machine(name: str, made: ast.expr) -> bool:
    return name.startswith("Test") and ast.unparse(made).rstrip(")").endswith(".TestCase")


def _is_collected(file: str, name: str) -> bool:
    path = ROOT / file
    return path.is_file() and path.name.startswith("test_") and name in _tests_in(path)


@pytest.mark.parametrize("page", PAGES)
def test_every_row_names_tests_that_are_collected_or_the_reason_why_it_needs_none(page: str) -> None:
    rows = [row for row in table_rows(read(page)) if "::" in row[-1] or row[-1].startswith(_REASON)]
    assert rows
    for row in rows:
        tests = _TEST.findall(row[-1])
        assert tests or row[-1].startswith(_REASON), row
        assert row[-1].count("::test_") == len(tests), row
        for file, name, _ in tests:
            assert _is_collected(file, name), f"{file}::{name}"


def test_no_row_of_findings_and_advisories_is_lost_or_empty() -> None:
    pages = [(PAGES[1], SECTIONS), (PAGES[2], FAILURES)]
    for page, heading, number in ((page, *item) for page, sections in pages for item in sections.items()):
        rows = table_rows(section(page, heading))
        assert len(rows) >= number, heading
        assert len({row[0] for row in rows}) == len(rows), heading
        for row in rows:
            assert _TEST.search(row[-1]) or row[-1].startswith(_REASON), row


def test_every_promise_of_the_architecture_names_tests_that_are_collected() -> None:
    rows = table_rows(section("ARCHITECTURE.md", "Promises, and the tests that keep them"))
    assert [row[0].partition(".")[0] for row in rows] == [str(number) for number in range(1, 9)]
    for promise, _, tests in rows:
        paths = [ROOT / path for path in re.findall(r"`(tests/[\w/.]+)`", tests)]
        assert paths, promise
        for path in paths:
            assert _has_tests(path), path


def _has_tests(path: Path) -> bool:
    """Whether pytest collects a test from the file, or from one in the folder."""
    files = path.rglob("test_*.py") if path.is_dir() else [path] if path.is_file() else []
    return any(map(_tests_in, files))


def test_every_promise_has_a_test() -> None:
    rows = table_rows(section(PAGES[0], "Promises, and the tests that keep them"))
    assert len(rows) >= 20
    for row in rows:
        assert _TEST.search(row[-1]), row


def test_the_check_sees_what_is_not_collected(tmp_path: Path) -> None:
    path = tmp_path / "test_x.py"
    path.write_text(
        "def test_a(): ...\nasync def test_b(): ...\ndef helper(): ...\n"
        "@pytest.mark.skip(reason='x')\ndef test_c(): ...\nif True:\n    def test_d(): ...\n"
        "TestM = Machine.TestCase\nTestN = pytest.mark.timeout(3)(Machine.TestCase)\nTestO = Machine.other\n"
        "class TestE:\n    def test_f(self): ...\nclass Other:\n    def test_g(self): ...\n",
        encoding="utf-8",
    )
    (tmp_path / "test_y.py").write_text("@pytest.mark.skip\ndef test_a(): ...\n", encoding="utf-8")
    assert _has_tests(path)
    assert _has_tests(tmp_path)
    assert not _has_tests(tmp_path / "test_y.py")
    assert not _has_tests(tmp_path / "test_z.py")
    assert _tests_in(path) == {"test_a", "test_b", "TestM", "TestN", "TestE::test_f"}
