"""Schemas of numbers between bounds that are close to each other, and numbers about there."""

from __future__ import annotations

import random
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

_WIDTHS = (0, 0.001, 0.01, 0.1, 0.5, 0.9, 1, 1.1, 2, 10)
_OFFSETS = ("0", "0.0000001", "0.001", "0.01", "0.1", "1")


def narrow_bounds(rng: random.Random) -> dict[str, Any]:
    """A schema with a lower and an upper bound, often together with `multipleOf`, some of them in `allOf`."""
    digits = rng.choice((0, 0, 1, 3))
    lower = round(rng.uniform(-12, 12), digits)
    upper = round(lower + rng.choice(_WIDTHS), 3)
    low = {rng.choice(("minimum", "exclusiveMinimum")): _number(lower)}
    high = {rng.choice(("maximum", "exclusiveMaximum")): _number(upper)}
    schema: dict[str, Any] = {"type": rng.choice(("number", "number", "integer"))}
    if rng.random() < 0.15:
        schema["multipleOf"] = rng.choice((0.1, 0.5, 0.25, 2, 0.01))
    return schema | ({"allOf": [low, high]} if rng.random() < 0.2 else low | high)


def _number(value: float) -> float:
    return int(value) if value == int(value) else value


def numbers_near(schema: dict[str, Any]) -> Iterator[str]:
    """Numbers about the bounds of such a schema, in several spellings."""
    own = [schema, *schema.get("allOf", ())]
    for bound in {Decimal(str(value)) for each in own for name, value in each.items() if "imum" in name}:
        for offset in (sign * Decimal(each) for each in _OFFSETS for sign in (1, -1)):
            yield from {f"{bound + offset:f}", f"{bound + offset:.1f}", f"{bound + offset:.4f}", "-0", "0.0"}
