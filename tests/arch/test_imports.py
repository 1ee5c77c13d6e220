"""The router and the supervisor start fast because they never load torch, not even indirectly."""

from __future__ import annotations

import subprocess
import sys

import pytest

SLOW_TO_IMPORT = ("torch", "triton", "transformers", "gguf", "ucxx")


@pytest.mark.parametrize("module", ["router_svc.__main__", "pdserve.cli.__main__", "pdserve.cli.up", "pdserve.net.rpc"])
def test_no_slow_library_is_loaded(module: str) -> None:
    code = f"import sys, {module}; print([name for name in {SLOW_TO_IMPORT!r} if name in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
