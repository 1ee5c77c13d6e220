"""Links resolve, mentioned files and names exist, and pages keep their format and length."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.arch.documents import DOCUMENTS, ROOT, names_in_first_column, path_id, read, section, table_rows

PACKAGES = ("router_svc", "worker_svc", "prefill_svc", "decode_svc", "pdserve", "kvtransfer", "kernels")
MAX_LINE = 120
#: About one page. Details belong in docs/internals.
MAX_WORDS_OF_A_DECISION = 550


def _slug(heading: str) -> str:
    """The anchor that GitHub generates for a heading."""
    kept = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower())
    return kept.replace(" ", "-")


@pytest.mark.parametrize("path", DOCUMENTS, ids=path_id)
def test_links_resolve(path: Path) -> None:
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        linked = (path.parent / name).resolve() if name else path
        assert linked.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", linked.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in map(_slug, headings), target


def test_every_document_is_in_the_index() -> None:
    index = read("docs/README.md")
    for path in (ROOT / "docs").rglob("*.md"):
        has_own_index = path.parent.name in ("decisions", "failures", "runbooks") and path.name != "README.md"
        if not has_own_index and path != ROOT / "docs/README.md":
            assert f"({path.relative_to(ROOT / 'docs')})" in index


def test_every_decision_is_one_page_and_in_the_index_with_its_status() -> None:
    index = {row[0]: row[2] for row in table_rows(read("docs/decisions/README.md"))}
    for path in sorted((ROOT / "docs/decisions").glob("0*.md")):
        text = path.read_text(encoding="utf-8")
        [status] = re.findall(r"^Status: (accepted|superseded by \[decision \d+\])", text, re.MULTILINE)
        assert index[f"[{int(path.name[:4])}]({path.name})"] == re.sub(r"\[decision (\d+)\]", r"\1", status)
        assert re.findall(r"^## (.+)$", text, re.MULTILINE) == ["Context", "Decision", "Consequences"], path.name
        assert len(text.split()) <= MAX_WORDS_OF_A_DECISION, path.name


@cache
def _definitions(path: Path) -> frozenset[str]:
    """Qualified names of the functions, classes, methods and constants of a module."""

    def names(body: list[ast.stmt], prefix: str) -> Iterator[str]:
        for node in body:
            match node:
                case ast.ClassDef():
                    yield prefix + node.name
                    yield from names(node.body, f"{prefix}{node.name}.")
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    yield prefix + node.name
                case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                    yield prefix + name

    return frozenset(names(ast.parse(path.read_text(encoding="utf-8")).body, ""))


@pytest.mark.parametrize("path", DOCUMENTS, ids=path_id)
def test_mentioned_files_and_names_exist(path: Path) -> None:
    names_in_files = rf"`((?:{'|'.join(PACKAGES)}|tests|benchmarks|proto)/[\w/.-]*)"
    for name, qualified in re.findall(rf"{names_in_files}(?::([\w.]+))?`", path.read_text(encoding="utf-8")):
        assert (ROOT / name).exists(), name
        if qualified:
            assert qualified in _definitions(ROOT / name), f"{name}:{qualified}"


def test_methods_mentioned_without_their_file_exist() -> None:
    sources = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    known = frozenset().union(*(_definitions(path) for path in sources if "_pb2" not in path.name))
    mentioned = re.findall(r"`([A-Z]\w+\.[a-z_]\w*)`", read("ARCHITECTURE.md"))
    assert mentioned
    assert set(mentioned) <= known


def test_architecture_md_is_short_and_names_every_package() -> None:
    text = read("ARCHITECTURE.md")
    assert len(text.splitlines()) <= 281
    table = section("ARCHITECTURE.md", "Packages")
    for package in PACKAGES:
        for path in (ROOT / package).rglob("__init__.py"):
            name = path.parent.name
            assert name in ("pdserve", "v1") or f"{name}/`" in table, path.parent


@pytest.mark.parametrize("path", DOCUMENTS, ids=path_id)
def test_prose_is_wrapped(path: Path) -> None:
    """Exceptions are tables, headings, and lines that start with a link or an HTML tag."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    lines = [line for line in text.splitlines() if not line.startswith(("|", "#", "<", "[")) and len(line) > MAX_LINE]
    assert lines == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=path_id)
def test_a_html_tag_is_on_one_line(path: Path) -> None:
    """Wrapping the prose must not wrap it, because some renderers then show it as text."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    assert [line for line in text.splitlines() if re.match(r"<\w", line) and ">" not in line] == []


def test_every_dependency_has_a_reason() -> None:
    project: Mapping[str, Any] = tomllib.loads(read("pyproject.toml"))["project"]
    requirements = [*project["dependencies"]]
    for extra in project["optional-dependencies"].values():
        requirements += extra
    names = {re.split(r"[<>=\[;]", requirement)[0] for requirement in requirements}
    assert set(names_in_first_column(section("ARCHITECTURE.md", "Why each dependency"))) == names


def test_the_changelog_has_this_version() -> None:
    [version] = re.findall(r'__version__ = "([^"]+)"', read("pdserve/__init__.py"))
    section = "Unreleased" if ".dev" in version else version
    assert f"## [{section}]" in read("CHANGELOG.md")
