"""Runbooks name commands, metrics and alerts that exist, and all have the same sections."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from pdserve.cli.__main__ import COMMANDS
from tests.deploy.catalog import RUNBOOKS, alerts, unknown_in

PAGES = sorted(path for path in RUNBOOKS.glob("*.md") if path.name != "README.md")
#: Programs of other projects that pages call.
FOREIGN = {"grep", "redis-cli", "kubectl", "timedatectl"}


def _blocks(path: Path, language: str) -> list[str]:
    text = path.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_a_page_says_what_users_see_where_to_look_what_to_do_and_when_it_is_over(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.startswith(f"# {path.name.removesuffix('.md')}\n")
    assert "\n**Users see:** " in text
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == ["Look at", "Do", "Over when"]
    assert len(text.splitlines()) <= 80


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_queries_of_a_page_ask_for_what_is_exported(path: Path) -> None:
    assert [found for query in _blocks(path, "promql") for found in unknown_in(query)] == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_commands_of_a_page_exist(path: Path) -> None:
    commands = [shlex.split(line) for block in _blocks(path, "sh") for line in block.splitlines() if line.strip()]
    for program, *arguments in commands:
        if program == "pdserve":
            assert arguments[0] in COMMANDS
        else:
            assert program in FOREIGN, program


@pytest.mark.parametrize("path", [*PAGES, RUNBOOKS / "README.md"], ids=lambda path: path.name)
def test_alerts_that_a_page_names_exist(path: Path) -> None:
    assert set(re.findall(r"\bPdserve[A-Z]\w+", path.read_text(encoding="utf-8"))) <= alerts().keys()


def test_the_index_lists_every_alert_with_its_severity() -> None:
    index = (RUNBOOKS / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[(\w+)\]\((\w+)\.md\) \| (\w+) \|", index, re.MULTILINE)
    assert {name: severity for name, _, severity in rows} == {
        name: rule["labels"]["severity"]  # type: ignore[index]
        for name, rule in alerts().items()
    }
    assert all(name == page for name, page, _ in rows)
