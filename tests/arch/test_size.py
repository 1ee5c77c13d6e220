"""A size beyond these usually hides two things. The bound is a ratchet, not a target."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("pdserve", "router_svc", "prefill_svc", "decode_svc", "kvtransfer", "kernels")
MAX_LINES = 400


def _sources() -> list[Path]:
    paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    return [path for path in paths if "_pb2" not in path.name]


@pytest.mark.parametrize("path", _sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_holds_one_thing(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_LINES
