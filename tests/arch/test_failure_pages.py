"""Every failure has a page of three sections, and the log lines that the pages quote are those of the code."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest

from tests.arch.documents import ROOT, code_blocks, path_id

FOLDER = ROOT / "docs/operations/failures"
PAGES = sorted(path for path in FOLDER.glob("*.md") if path.name != "README.md")
_LINE = re.compile(r"(INFO|WARNING|ERROR) ([a-z_.]+) (\w+)((?: \w+=(?:'.*?'|\S+))*)$")


@cache
def _events(path: Path) -> Mapping[tuple[str, str], set[str]]:
    """The fields that a module logs, by level and event."""
    found: dict[tuple[str, str], set[str]] = defaultdict(set)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id="log"), attr=level), args=[ast.Constant(value=str(event)), *_]
            ):
                found[level.upper(), event] |= {keyword.arg for keyword in node.keywords if keyword.arg}
    return found


def _wrong(line: str) -> str:
    """What is wrong with a quoted log line; empty: nothing."""
    parsed = _LINE.match(line)
    if parsed is None:
        return "not a log line"
    level, module, event, fields = parsed.groups()
    path = ROOT / f"{module.replace('.', '/')}.py"
    if not path.is_file() or (level, event) not in _events(path):
        return "not logged there"
    # Every line of a request has its id.
    names = set(re.findall(r" (\w+)=", fields)) - {"request_id"}
    return "" if names <= _events(path)[level, event] else "has other fields"


def test_every_page_is_in_the_index() -> None:
    index = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\]\(([\w-]+\.md)\)", index)) == {path.name for path in PAGES}


@pytest.mark.parametrize("path", PAGES, ids=path_id)
def test_a_page_says_what_it_looks_like_what_happens_by_itself_and_what_to_do(path: Path) -> None:
    headings = re.findall(r"^## (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    assert headings == ["What it looks like", "What happens by itself", "What to do"]


@pytest.mark.parametrize("path", PAGES, ids=path_id)
def test_quoted_log_lines_are_those_of_the_code(path: Path) -> None:
    lines = [line for block in code_blocks(str(path.relative_to(ROOT)), "text") for line in block.splitlines()]
    assert {line: _wrong(line) for line in lines if _wrong(line)} == {}


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("WARNING decode_svc.service commit_refused reason='x' request_id=r", ""),
        ("INFO decode_svc.service commit_refused reason='x'", "not logged there"),
        ("WARNING decode_svc.service commit_denied reason='x'", "not logged there"),
        ("WARNING decode_svc.server commit_refused", "not logged there"),
        ("WARNING decode_svc.service commit_refused why='x'", "has other fields"),
        ("commit_refused", "not a log line"),
    ],
)
def test_the_check_sees_it(line: str, wrong: str) -> None:
    assert _wrong(line) == wrong
