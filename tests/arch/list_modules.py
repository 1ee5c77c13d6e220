"""List every module with the first line of its docstring, package by package (`make modules`)."""

from __future__ import annotations

import ast
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("router_svc", "worker_svc", "prefill_svc", "decode_svc", "kvtransfer", "kernels", "pdserve")


def summary(path: Path) -> str:
    """The first line of a module's docstring, or an empty string."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    return docstring.splitlines()[0] if docstring else ""


def modules() -> list[Path]:
    """All modules of the product except the generated ones."""
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return [path for path in paths if "v1" not in path.parts]


def main() -> None:
    for package, paths in groupby(sorted(modules(), key=lambda path: path.parent), key=lambda path: path.parent):
        print(f"\n{package.relative_to(ROOT)}/")
        for path in paths:
            print(f"  {path.name:24} {summary(path)}")


if __name__ == "__main__":
    main()
