"""What the code must not use, because the first releases of a supported Python do something else."""

from __future__ import annotations

import ast

from tests.arch.list_modules import modules


def test_nothing_is_raised_within_except_star() -> None:
    """Before Python 3.11.4, as in Debian 12, it arrives as a group, which no handler expects."""
    found = []
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.TryStar):
                handlers = (each for handler in node.handlers for each in ast.walk(handler))
                found += [f"{path}:{each.lineno}" for each in handlers if isinstance(each, ast.Raise)]
    assert found == []
