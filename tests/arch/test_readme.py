"""What the documents name exists, and what exists is documented: commands, flags, metrics, fields, links, files."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import json
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import openai.resources.chat.completions
import pytest

from decode_svc.config import DecodeConfig
from pdserve.base.config import add_options, option_spec
from pdserve.cli.__main__ import COMMANDS
from pdserve.cli.bench.config import ServeConfig
from pdserve.cli.chat import ChatConfig
from pdserve.cli.status import StatusConfig
from pdserve.cli.trace import TraceConfig
from pdserve.cli.up_config import UpConfig
from pdserve.v1 import inference_pb2
from pdserve.worker.config import WorkerConfig
from pdserve.worker.serve.metrics import WorkerMetrics
from prefill_svc.config import PrefillConfig
from router_svc.api.fields import IGNORED, UNSUPPORTED
from router_svc.api.openai.schema import ChatBody, CompletionBody, GenerationBody
from router_svc.api.parse import parse_body
from router_svc.config import RouterConfig
from router_svc.records.metrics import RouterMetrics

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
PACKAGES = ("router_svc", "prefill_svc", "decode_svc", "pdserve", "kvtransfer", "kernels")
CLI_CONFIGS: dict[str, type[Any]] = {
    "up": UpConfig,
    "chat": ChatConfig,
    "status": StatusConfig,
    "trace": TraceConfig,
    "bench serve": ServeConfig,
}
SERVICE_CONFIGS: dict[str, type[Any]] = {
    "router_svc": RouterConfig,
    "prefill_svc": PrefillConfig,
    "decode_svc": DecodeConfig,
}
MAX_LINE = 120
#: One page; details belong to docs/internals.
MAX_WORDS_OF_A_DECISION = 550
#: Flags in our documents that belong to other programs.
FOREIGN_FLAGS = {"--appendonly", "--cap-add", "--ipc", "--pid", "--save", "--shm-size", "--ulimit"}


def _text(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def _blocks(path: str, language: str) -> list[str]:
    """The fenced code blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", _text(path), re.MULTILINE | re.DOTALL)


def _section(path: str, heading: str) -> str:
    """What stands below a heading, up to the next of its level."""
    match = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", _text(path), re.MULTILINE | re.DOTALL)
    assert match is not None, f"{path} has no section {heading!r}"
    return match[1]


def _rows(markdown: str) -> list[list[str]]:
    """The rows of all tables, cell by cell, without headers."""
    lines = markdown.splitlines()
    rows = [re.split(r"(?<!\\)\|", line.strip())[1:-1] for line in lines if line.startswith("|")]
    cells = [[cell.strip() for cell in row] for row in rows]
    is_rule = [all(re.fullmatch(r"-+", cell) for cell in row) for row in cells]
    headers = {index - 1 for index, rule in enumerate(is_rule) if rule}
    return [row for index, row in enumerate(cells) if not is_rule[index] and index not in headers]


def _named(markdown: str) -> list[str]:
    """The names in backticks of the tables' first column."""
    return [name for row in _rows(markdown) for name in re.findall(r"`([^`]+)`", row[0])]


# Flags


def _documented_default(cell: str, field: dataclasses.Field[Any]) -> object:
    words = {"required": dataclasses.MISSING, "–": None, "off": False}
    if cell in words:
        return words[cell]
    value = cell.strip("`")
    parse = option_spec(field).parse
    if parse is not None:
        return parse(value)
    return type(field.default)(value)


@pytest.mark.parametrize(
    ("heading", "config", "without"),
    [
        ("pdserve up", UpConfig, None),
        ("pdserve chat", ChatConfig, None),
        ("pdserve status", StatusConfig, None),
        ("pdserve trace", TraceConfig, None),
        ("pdserve bench serve", ServeConfig, None),
        ("Router", RouterConfig, None),
        ("Workers of both tiers", PrefillConfig, None),
        ("Decode worker", DecodeConfig, WorkerConfig),
    ],
)
def test_every_flag_is_documented_with_its_default(heading: str, config: type, without: type | None) -> None:
    inherited = {field.name for field in dataclasses.fields(without)} if without is not None else set()
    fields = {
        field.name.upper() if option_spec(field).positional else f"--{field.name.replace('_', '-')}": field
        for field in dataclasses.fields(config)
        if field.name not in inherited
    }
    rows = {row[0].strip("`"): row[1] for row in _rows(_section("docs/operations/flags.md", heading))}
    assert list(rows) == list(fields)
    for flag, cell in rows.items():
        default = fields[flag].default
        expected = None if default in ((), "") else default
        assert _documented_default(cell, fields[flag]) == expected, flag
        for choice in option_spec(fields[flag]).choices:
            assert f"`{choice}`" in _section("docs/operations/flags.md", heading)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_flag_and_variable_that_is_mentioned_exists(path: Path) -> None:
    configs = [*CLI_CONFIGS.values(), *SERVICE_CONFIGS.values()]
    fields = [field for config in configs for field in dataclasses.fields(config)]
    flags = {f"--{field.name.replace('_', '-')}" for field in fields}
    flags |= {f"--no-{field.name.replace('_', '-')}" for field in fields if field.type == "bool"}
    code = " ".join(re.findall(r"```.*?```|`[^`]+`", path.read_text(encoding="utf-8"), re.DOTALL))
    mentioned = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]", code))
    assert mentioned - flags - {"--config"} <= FOREIGN_FLAGS
    for service, name in re.findall(r"PDSERVE_([A-Z]+(?:_[A-Z]+)*)__([A-Z_]+)", code):
        config = CLI_CONFIGS.get(service.lower().replace("_", " ")) or SERVICE_CONFIGS[f"{service.lower()}_svc"]
        assert name.lower() in {*(field.name for field in dataclasses.fields(config)), "config"}


# Commands


def _commands(path: str) -> Iterator[list[str]]:
    """The shell commands of a document, as words; a command may go on over lines within quotes."""
    for block in _blocks(path, "sh"):
        words = shlex.split(block.replace("\n", " ;\n ") if "'" not in block else block, comments=True)
        command: list[str] = []
        for word in [*words, ";"]:
            if word in (";", "&"):
                if command:
                    yield command
                command = []
            elif command or not re.fullmatch(r"[A-Z_]+=\S*", word):
                command.append(word)


@pytest.mark.parametrize(
    "path", ["README.md", *(f"docs/operations/{name}.md" for name in ("running", "flags", "benchmarks"))]
)
def test_commands_are_real(path: str) -> None:
    commands = list(_commands(path))
    assert commands
    targets = set(re.findall(r"^([a-z-]+):", _text("Makefile"), re.MULTILINE))
    for program, *arguments in commands:
        match program:
            case "make":
                assert {word for word in arguments if "=" not in word} <= targets
            case "pdserve":
                assert arguments[0] in COMMANDS
                num_words = 2 if arguments[0] == "bench" else 1
                _parse(CLI_CONFIGS[" ".join(arguments[:num_words])], arguments[num_words:])
            case "python" if arguments[1] in SERVICE_CONFIGS:
                _parse(SERVICE_CONFIGS[arguments[1]], arguments[2:])
            case "python":
                assert (ROOT / (arguments[1].replace(".", "/") + ".py")).is_file()
            case _:
                assert program in ("curl", "redis-server"), program


def _parse(config: type[Any], arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    add_options(parser, config)
    _, unknown = parser.parse_known_args(arguments)
    assert not unknown


def test_the_curl_example_is_a_request_that_is_taken() -> None:
    [command] = [block for block in _blocks("README.md", "sh") if block.startswith("curl")]
    words = shlex.split(command)
    assert "http://127.0.0.1:8000/v1/chat/completions" in words
    body = parse_body(ChatBody, words[words.index("-d") + 1].encode())
    assert body.model == UpConfig().model


def test_the_python_example_calls_what_the_client_has() -> None:
    [code] = _blocks("README.md", "python")
    calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    [create] = [call for call in calls if ast.unparse(call.func) == "client.chat.completions.create"]
    known = inspect.signature(openai.resources.chat.completions.Completions.create).parameters
    fields = {keyword.arg: ast.literal_eval(keyword.value) for keyword in create.keywords if keyword.arg}
    assert set(fields) <= set(known)
    assert parse_body(ChatBody, json.dumps(fields).encode()).model == UpConfig().model
    [client] = [call for call in calls if ast.unparse(call.func) == "OpenAI"]
    assert {keyword.arg for keyword in client.keywords} <= set(inspect.signature(openai.OpenAI).parameters)


def test_the_grpc_example_sets_fields_that_exist() -> None:
    [code] = _blocks("docs/grpc-api.md", "python")
    for call in (node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)):
        message = ast.unparse(call.func).removeprefix("inference_pb2.")
        if message in inference_pb2.DESCRIPTOR.message_types_by_name:
            known = inference_pb2.DESCRIPTOR.message_types_by_name[message].fields_by_name
            assert {keyword.arg for keyword in call.keywords} <= set(known)


# HTTP API


def test_every_field_of_the_api_is_documented() -> None:
    both = set(_named(_section("docs/http-api.md", "Fields of both generating endpoints")))
    assert both == set(GenerationBody.model_fields)
    for heading, body in (("Chat", ChatBody), ("Completions", CompletionBody)):
        own = set(_named(_section("docs/http-api.md", heading)))
        assert own == set(body.model_fields) - both


@pytest.mark.parametrize(
    ("heading", "names"), [("Fields without effect", set(IGNORED)), ("Fields that are refused", set(UNSUPPORTED))]
)
def test_ignored_and_refused_fields_are_documented(heading: str, names: set[str]) -> None:
    *_, listed = _section("docs/http-api.md", heading).strip().split("\n\n")
    assert set(re.findall(r"`(\w+)`", listed)) == names


def test_every_path_is_documented() -> None:
    route = re.compile(r'web\.(get|post)\("([^"]+)"')
    sources = [*(ROOT / "router_svc").rglob("*.py"), ROOT / "pdserve/base/admin.py"]
    found = {match for path in sources for match in route.findall(path.read_text(encoding="utf-8"))}
    exist = {f"{method.upper()} {path.replace(':.+', '')}" for method, path in found}
    assert set(_named(_text("docs/http-api.md").split("\n## ")[0])) == exist


# Metrics


def _counter_sources(path: str) -> set[str]:
    """Names of the `CounterSource`s made in a module: those live with who counts, not in the metrics class."""
    calls = [node for node in ast.walk(ast.parse(_text(path))) if isinstance(node, ast.Call)]
    return {
        f"pdserve_{ast.literal_eval(keyword.value)}"
        for call in calls
        if ast.unparse(call.func) == "CounterSource"
        for keyword in call.keywords
        if keyword.arg == "name"
    }


@pytest.mark.parametrize(
    ("heading", "metrics", "made_in"),
    [
        ("Router", RouterMetrics(model_name="m"), ("router_svc/service.py",)),
        (
            "Workers",
            WorkerMetrics(model_name="m", tier="decode"),
            ("pdserve/worker/serve/announce.py", "pdserve/worker/serve/step_metrics.py"),
        ),
    ],
)
def test_every_metric_is_documented_and_every_documented_one_exists(
    heading: str, metrics: RouterMetrics | WorkerMetrics, made_in: tuple[str, ...]
) -> None:
    families = {family.name: family.type for family in metrics.registry.collect()}
    exported = {name: kind for name, kind in families.items() if name.startswith("pdserve_")}
    exported |= dict.fromkeys(set[str]().union(*map(_counter_sources, made_in)), "counter")
    rows = _rows(_section("docs/operations/metrics.md", heading))
    assert {row[0].strip("`"): row[1] for row in rows} == exported


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_metric_that_is_mentioned_exists(path: Path) -> None:
    known = {row[0].strip("`") for row in _rows(_text("docs/operations/metrics.md"))}
    for name in re.findall(r"\bpdserve_[a-z0-9_]*[a-z0-9]", path.read_text(encoding="utf-8")):
        assert re.sub(r"_(total|bucket|sum|count)$", "", name) in known | {name} & known, name


# Links and names


def _slug(heading: str) -> str:
    """The anchor GitHub gives a heading."""
    kept = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower())
    return kept.replace(" ", "-")


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
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
    index = _text("docs/README.md")
    for path in (ROOT / "docs").rglob("*.md"):
        if path.parent.name != "decisions" and path != ROOT / "docs/README.md":
            assert f"({path.relative_to(ROOT / 'docs')})" in index


def test_every_decision_is_one_page_and_in_the_index_with_its_status() -> None:
    index = {row[0]: row[2] for row in _rows(_text("docs/decisions/README.md"))}
    for path in sorted((ROOT / "docs/decisions").glob("0*.md")):
        text = path.read_text(encoding="utf-8")
        [status] = re.findall(r"^Status: (accepted|superseded by \[decision \d+\])", text, re.MULTILINE)
        assert index[f"[{int(path.name[:4])}]({path.name})"] == re.sub(r"\[decision (\d+)\]", r"\1", status)
        assert re.findall(r"^## (.+)$", text, re.MULTILINE) == ["Context", "Decision", "Consequences"], path.name
        assert len(text.split()) <= MAX_WORDS_OF_A_DECISION, path.name


@cache
def _definitions(path: Path) -> frozenset[str]:
    """Qualified names of what a module defines: functions, classes, methods, constants."""

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


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_names_that_are_mentioned_exist(path: Path) -> None:
    places = r"`((?:router_svc|prefill_svc|decode_svc|pdserve|kvtransfer|kernels|tests|benchmarks|proto)/[\w/.-]*)"
    for name, qualified in re.findall(rf"{places}(?::([\w.]+))?`", path.read_text(encoding="utf-8")):
        assert (ROOT / name).exists(), name
        if qualified:
            assert qualified in _definitions(ROOT / name), f"{name}:{qualified}"


def test_methods_that_are_mentioned_without_their_file_exist() -> None:
    sources = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    known = frozenset().union(*(_definitions(path) for path in sources if "_pb2" not in path.name))
    mentioned = re.findall(r"`([A-Z]\w+\.[a-z_]\w*)`", _text("ARCHITECTURE.md"))
    assert mentioned
    assert set(mentioned) <= known


def test_the_architecture_fits_on_a_few_screens_and_names_every_package() -> None:
    text = _text("ARCHITECTURE.md")
    assert len(text.splitlines()) <= 250
    table = _section("ARCHITECTURE.md", "Packages")
    for package in PACKAGES:
        for path in (ROOT / package).rglob("__init__.py"):
            name = path.parent.name
            assert name in ("pdserve", "v1") or f"{name}/`" in table, path.parent


def test_the_walk_of_a_request_opens_at_most_25_files() -> None:
    walk = _section("ARCHITECTURE.md", "A request's life")
    files = set(re.findall(r"`((?:router_svc|prefill_svc|decode_svc|pdserve|kvtransfer|kernels)/[\w/.-]*\.\w+)", walk))
    assert 10 < len(files) <= 25


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_prose_is_wrapped(path: Path) -> None:
    """Tables are not, and neither is a line that holds one link or name and nothing else."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    lines = [line for line in text.splitlines() if not line.startswith(("|", "#", "<", "[")) and len(line) > MAX_LINE]
    assert lines == []


def test_every_dependency_has_a_reason() -> None:
    project: Mapping[str, Any] = tomllib.loads(_text("pyproject.toml"))["project"]
    requirements = [*project["dependencies"]]
    for extra in project["optional-dependencies"].values():
        requirements += extra
    names = {re.split(r"[<>=\[;]", requirement)[0] for requirement in requirements}
    assert set(_named(_section("ARCHITECTURE.md", "Why each dependency"))) == names


def test_the_changelog_has_this_version() -> None:
    [version] = re.findall(r'__version__ = "([^"]+)"', _text("pdserve/__init__.py"))
    assert f"## [{version}]" in _text("CHANGELOG.md")
