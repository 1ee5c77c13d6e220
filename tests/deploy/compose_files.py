"""The compose files as data: variables at their defaults, override files merged as Compose merges them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml

from tests.arch.documents import ROOT

COMPOSE = ROOT / "compose"
BASE, GPU, MONITORING = "compose.yaml", "compose.gpu.yaml", "compose.monitoring.yaml"
#: On top of `GPU`.
ONE_GPU = "compose.one-gpu.yaml"
STACKS = ((BASE,), (BASE, GPU), (BASE, GPU, ONE_GPU), (BASE, MONITORING), (BASE, GPU, MONITORING))
WORKERS = ("prefill", "decode")
_VARIABLE = re.compile(r"\$\{(?P<name>\w+):?-(?P<default>[^}]*)\}")


def load(*names: str, variables: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The merged content of compose files, with these variables set and all others at their defaults."""
    given = variables or {}
    merged: dict[str, Any] = {}
    for name in names:
        text = (COMPOSE / name).read_text(encoding="utf-8")
        text = _VARIABLE.sub(lambda match: given.get(match["name"], match["default"]), text)
        assert "${" not in text, "every variable has a default"
        merged = _merged(merged, yaml.safe_load(text))
    return merged


def _merged(below: Any, above: Any) -> Any:
    if isinstance(below, dict) and isinstance(above, dict):
        result = dict(below)
        for key, value in above.items():
            # Commands are replaced; other lists grow.
            result[key] = value if key in ("command", "entrypoint") else _merged(result.get(key), value)
        return result
    if isinstance(below, list) and isinstance(above, list):
        return [*below, *above]
    return above


def seconds(text: str) -> float:
    """Seconds of a duration such as `75s` or `1m30s`."""
    units = {"s": 1.0, "m": 60.0, "h": 3600.0}
    return sum(float(number) * units[unit] for number, unit in re.findall(r"([\d.]+)([smh])", text))


def has_gpus(service: dict[str, Any]) -> bool:
    """Whether the NVIDIA Container Toolkit prepares the container: its hook fails with a root that is read-only."""
    return bool(service.get("deploy", {}).get("resources", {}).get("reservations", {}).get("devices"))
