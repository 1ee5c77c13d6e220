"""What starts fast stays light: neither the router nor the supervisor may load torch, not even through others."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "triton", "transformers", "gguf", "ucxx")


@pytest.mark.parametrize(
    "module", ["router_svc.__main__", "pdserve.cli.__main__", "pdserve.cli.up", "pdserve.base.rpc"]
)
def test_no_heavy_library_is_loaded(module: str) -> None:
    code = f"import sys, {module}; print([name for name in {HEAVY!r} if name in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
