"""The documents of the repository, read as text, sections, tables and code blocks."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def path_id(path: Path) -> str:
    """The name of a parametrized test with this document."""
    return str(path.relative_to(ROOT))


def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def code_blocks(path: str, language: str) -> list[str]:
    """The fenced code blocks in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", read(path), re.MULTILINE | re.DOTALL)


def section(path: str, heading: str) -> str:
    """The text between a heading and the next one of its level."""
    match = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", read(path), re.MULTILINE | re.DOTALL)
    assert match is not None, f"{path} has no section {heading!r}"
    return match[1]


def table_rows(markdown: str) -> list[list[str]]:
    """The cells of all tables, row by row, without headers."""
    lines = markdown.splitlines()
    rows = [re.split(r"(?<!\\)\|", line.strip())[1:-1] for line in lines if line.startswith("|")]
    cells = [[cell.strip() for cell in row] for row in rows]
    is_rule = [all(re.fullmatch(r"-+", cell) for cell in row) for row in cells]
    headers = {index - 1 for index, rule in enumerate(is_rule) if rule}
    return [row for index, row in enumerate(cells) if not is_rule[index] and index not in headers]


def names_in_first_column(markdown: str) -> list[str]:
    """The names in backticks of the tables' first column."""
    return [name for row in table_rows(markdown) for name in re.findall(r"`([^`]+)`", row[0])]
