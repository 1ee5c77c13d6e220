"""Flags, commands and examples in documents match the code, and every flag is documented."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import pdserve
from decode_svc.config import DecodeConfig
from pdserve.base.config import add_options, option_fields, option_spec
from pdserve.cli.__main__ import COMMANDS
from pdserve.cli.bench.config import ServeConfig
from pdserve.cli.chaos.config import ChaosConfig
from pdserve.cli.chat import ChatConfig
from pdserve.cli.doctor import DoctorConfig
from pdserve.cli.drain import DrainConfig
from pdserve.cli.fetch import FetchConfig
from pdserve.cli.health import HealthConfig
from pdserve.cli.key import KeyConfig
from pdserve.cli.plan import PlanConfig
from pdserve.cli.rebalance import RebalanceConfig
from pdserve.cli.role import RoleConfig
from pdserve.cli.run_batch import RunBatchConfig
from pdserve.cli.secrets import SecretsConfig
from pdserve.cli.status import StatusConfig
from pdserve.cli.trace import TraceConfig
from pdserve.cli.up_config import UpConfig
from pdserve.cli.vllm_flags import FLAGS as VLLM_FLAGS
from pdserve.v1 import inference_pb2
from pdserve.worker.config import WorkerConfig
from prefill_svc.config import PrefillConfig
from router_svc.api.openai.schema import ChatBody
from router_svc.api.parse import parse_body
from router_svc.config import RouterConfig
from tests.arch.documents import DOCUMENTS, ROOT, code_blocks, path_id, read, section, table_rows
from tests.support.lazily import openai

CLI_CONFIGS: dict[str, type[Any]] = {
    "up": UpConfig,
    "chat": ChatConfig,
    "run-batch": RunBatchConfig,
    "status": StatusConfig,
    "trace": TraceConfig,
    "doctor": DoctorConfig,
    "drain": DrainConfig,
    "role": RoleConfig,
    "plan": PlanConfig,
    "fetch": FetchConfig,
    "health": HealthConfig,
    "secrets": SecretsConfig,
    "key": KeyConfig,
    "bench serve": ServeConfig,
    "chaos": ChaosConfig,
}
SERVICE_CONFIGS: dict[str, type[Any]] = {
    "router_svc": RouterConfig,
    "prefill_svc": PrefillConfig,
    "decode_svc": DecodeConfig,
    "worker_svc.prefill": DecodeConfig,
    "worker_svc.decode": DecodeConfig,
}
#: Flags in our documents that belong to other programs.
FOREIGN_FLAGS = {
    *("--appendonly", "--cap-add", "--enable-feature", "--for", "--ipc", "--pid", "--save", "--shm-size", "--target"),
    *(
        "--entrypoint",
        "--force-recreate",
        "--no-recreate",
        "--rm",
        "--scale",
        "--timeout",
        "--ulimit",
        "--volumes",
    ),
    "--no-build",
    *("--create-namespace", "--namespace", "--set"),  # helm
    *("--again", "--areas"),  # python -m tests.fuzz
    *("--list", "--ci"),  # python -m tests.check, python -m tests.deploy
    *("--requests", "--faults", "--trace", "--replay", "--mutation"),  # python -m tests.simulation
}


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
        ("pdserve run-batch", RunBatchConfig, None),
        ("pdserve status", StatusConfig, None),
        ("pdserve trace", TraceConfig, None),
        ("pdserve fetch", FetchConfig, None),
        ("pdserve health", HealthConfig, None),
        ("pdserve secrets", SecretsConfig, None),
        ("pdserve key", KeyConfig, None),
        ("pdserve doctor", DoctorConfig, None),
        ("pdserve drain", DrainConfig, None),
        ("pdserve rebalance", RebalanceConfig, None),
        ("pdserve role", RoleConfig, None),
        ("pdserve plan", PlanConfig, None),
        ("pdserve bench serve", ServeConfig, None),
        ("pdserve chaos", ChaosConfig, None),
        ("Router", RouterConfig, None),
        ("Workers of both tiers", PrefillConfig, None),
        ("Decode worker", DecodeConfig, WorkerConfig),
    ],
)
def test_every_flag_is_documented_with_its_default(heading: str, config: type, without: type | None) -> None:
    inherited = {field.name for field in dataclasses.fields(without)} if without is not None else set()
    fields = {
        field.name.upper() if option_spec(field).positional else f"--{field.name.replace('_', '-')}": field
        for field in option_fields(config)
        if field.name not in inherited
    }
    rows = {row[0].strip("`"): row[1] for row in table_rows(section("docs/operations/flags.md", heading))}
    assert list(rows) == list(fields)
    for flag, cell in rows.items():
        default = fields[flag].default
        expected = None if default in ((), "") else default
        assert _documented_default(cell, fields[flag]) == expected, flag
        for choice in option_spec(fields[flag]).choices:
            assert f"`{choice}`" in section("docs/operations/flags.md", heading)


@pytest.mark.parametrize("path", DOCUMENTS, ids=path_id)
def test_every_mentioned_flag_and_variable_exists(path: Path) -> None:
    configs = [*CLI_CONFIGS.values(), *SERVICE_CONFIGS.values()]
    fields = [field for config in configs for field in dataclasses.fields(config)]
    flags = {f"--{field.name.replace('_', '-')}" for field in fields}
    flags |= {f"--no-{field.name.replace('_', '-')}" for field in fields if field.type == "bool"}
    code = " ".join(re.findall(r"```.*?```|`[^`]+`", path.read_text(encoding="utf-8"), re.DOTALL))
    mentioned = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]", code))
    foreign = FOREIGN_FLAGS | set(VLLM_FLAGS) if path.name == "from-vllm.md" else FOREIGN_FLAGS
    assert mentioned - flags - {"--config"} <= foreign
    for service, name in re.findall(r"PDSERVE_([A-Z]+(?:_[A-Z]+)*)__([A-Z_]+)", code):
        config = CLI_CONFIGS.get(service.lower().replace("_", " ")) or SERVICE_CONFIGS[f"{service.lower()}_svc"]
        assert name.lower() in {*(field.name for field in dataclasses.fields(config)), "config"}


def _commands(path: str) -> Iterator[list[str]]:
    """The shell commands of a document, split into words. A quoted argument may span lines."""
    for block in code_blocks(path, "sh"):
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
    "path",
    [
        "README.md",
        *(f"docs/operations/{name}.md" for name in ("running", "flags", "benchmarks", "chaos", "doctor", "plan")),
    ],
)
def test_commands_exist_and_accept_their_arguments(path: str) -> None:
    commands = list(_commands(path))
    assert commands
    targets = set(re.findall(r"^([a-z-]+):", read("Makefile"), re.MULTILINE))
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
            case "docker":
                assert all((ROOT / word).is_file() for word in arguments if word.endswith(".yaml"))
            case _:
                assert program in ("alias", "curl", "export", "redis-server"), program


def _parse(config: type[Any], arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    add_options(parser, config)
    _, unknown = parser.parse_known_args(arguments)
    assert not unknown


def test_the_curl_example_is_a_valid_request() -> None:
    [command] = [block for block in code_blocks("README.md", "sh") if block.startswith("curl")]
    words = shlex.split(command)
    # After the start with Docker a key is needed; a router without keys ignores an empty one.
    assert "Authorization: Bearer $PDSERVE_API_KEY" in words
    assert "http://127.0.0.1:8000/v1/chat/completions" in words
    body = parse_body(ChatBody, words[words.index("-d") + 1].encode())
    assert body.model == UpConfig().model[0]


def test_the_python_example_uses_methods_and_arguments_of_the_client() -> None:
    [code] = [each for each in code_blocks("README.md", "python") if "from openai" in each]
    calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    [create] = [call for call in calls if ast.unparse(call.func) == "client.chat.completions.create"]
    known = inspect.signature(openai.resources.chat.Completions.create).parameters
    fields = {keyword.arg: ast.literal_eval(keyword.value) for keyword in create.keywords if keyword.arg}
    assert set(fields) <= set(known)
    assert parse_body(ChatBody, json.dumps(fields).encode()).model == UpConfig().model[0]
    [client] = [call for call in calls if ast.unparse(call.func) == "OpenAI"]
    assert {keyword.arg for keyword in client.keywords} <= set(inspect.signature(openai.OpenAI).parameters)


@pytest.mark.parametrize("path", DOCUMENTS, ids=path_id)
def test_examples_import_what_the_package_exports(path: Path) -> None:
    for code in code_blocks(path, "python"):
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ImportFrom) and node.module == "pdserve":
                assert {alias.name for alias in node.names} <= set(pdserve.__all__)


def test_the_grpc_examples_set_fields_that_exist() -> None:
    codes = code_blocks("docs/grpc-api.md", "python")
    assert len(codes) == 2
    for call in (node for code in codes for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)):
        message = ast.unparse(call.func).removeprefix("inference_pb2.")
        if message in inference_pb2.DESCRIPTOR.message_types_by_name:
            known = inference_pb2.DESCRIPTOR.message_types_by_name[message].fields_by_name
            assert {keyword.arg for keyword in call.keywords} <= set(known)
