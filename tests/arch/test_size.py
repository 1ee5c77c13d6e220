"""The sizes of STYLE: what is beyond them usually hides two things."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("pdserve", "router_svc", "worker_svc", "prefill_svc", "decode_svc", "kvtransfer", "kernels")
MAX_MODULE_LINES = 300
MAX_FUNCTION_LINES = 40
MAX_PARAMETERS = 6


def _sources() -> Iterator[tuple[str, str]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if "_pb2" not in path.name:
                yield str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")


def _functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """All functions outside of `kernels/triton`: a kernel takes every stride and keeps its loop in one piece."""
    for name, source in _sources():
        if not name.startswith("kernels/triton/"):
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield f"{name}:{node.name}", node


def _too_large(sizes: Iterator[tuple[str, int]], limit: int) -> dict[str, int]:
    return {name: size for name, size in sizes if size > limit}


def test_a_module_has_at_most_300_lines() -> None:
    sizes = ((name, len(source.splitlines())) for name, source in _sources())
    assert _too_large(sizes, MAX_MODULE_LINES) == {}


def test_a_function_has_at_most_40_lines() -> None:
    sizes = ((name, (node.end_lineno or 0) - node.lineno + 1) for name, node in _functions())
    assert _too_large(sizes, MAX_FUNCTION_LINES) == {}


def test_a_function_has_at_most_6_parameters() -> None:
    def count(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
        given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        return len([argument for argument in given if argument.arg not in ("self", "cls")])

    assert _too_large(((name, count(node)) for name, node in _functions()), MAX_PARAMETERS) == {}
