"""A module that claims to be pure is held to it: by the import contract in pyproject.toml."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("pdserve", "router_svc", "worker_svc", "prefill_svc", "decode_svc", "kvtransfer", "kernels")


def _held() -> set[str]:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    [pure] = [contract for contract in contracts if " pure" in contract["name"]]
    return set(pure["source_modules"])


def _claims_purity(path: Path) -> bool:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return re.search(r"\bPure\b", docstring) is not None


def test_modules_that_claim_purity_are_in_the_contract() -> None:
    paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py") if _claims_purity(path)]
    claiming = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths}
    held = _held()
    assert {
        name for name in claiming if not any(name == module or name.startswith(f"{module}.") for module in held)
    } == set()
