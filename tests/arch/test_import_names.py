"""Two of our package names also exist on PyPI. Ours must be found first and must not be mistaken for those."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_kernels_is_our_package_and_exports_nothing() -> None:
    spec = importlib.util.find_spec("kernels")
    assert spec is not None
    assert spec.origin == str(ROOT / "kernels" / "__init__.py")
    code = (
        "import kernels;"
        "print([name for name in vars(kernels) if not name.startswith('__')], hasattr(kernels, '__version__'))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[] False"


def test_proto_is_not_a_package_so_that_proto_plus_keeps_its_name() -> None:
    assert not list((ROOT / "proto").rglob("__init__.py"))


def test_transformers_does_not_mistake_our_kernels_for_the_hub_package() -> None:
    code = "from transformers.utils.import_utils import is_kernels_available; print(is_kernels_available())"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"
