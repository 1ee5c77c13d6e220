"""Where a JSON schema has subschemas, and what its references mean."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard
from urllib.parse import unquote

OF_NAMES = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
OF_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
SINGLE = (
    *("items", "additionalProperties", "contains", "propertyNames", "not", "if", "then", "else"),
    *("unevaluatedItems", "unevaluatedProperties", "additionalItems"),
)

Path = tuple[str, ...]


def is_number(value: object) -> TypeGuard[float]:
    """Whether it is a number in JSON."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def subschemas(schema: Mapping[str, Any]) -> Iterator[tuple[Path, Any]]:
    """The subschemas that a schema contains directly, with the steps to each."""
    for keyword in OF_NAMES:
        if isinstance(schema.get(keyword), dict):
            yield from (((keyword, name), child) for name, child in schema[keyword].items())
    for keyword in (*OF_LISTS, "items"):
        if isinstance(schema.get(keyword), list):
            yield from (((keyword, str(index)), child) for index, child in enumerate(schema[keyword]))
    for keyword in SINGLE:
        if isinstance(schema.get(keyword), dict):
            yield (keyword,), schema[keyword]


def reachable(root: Mapping[str, Any]) -> Iterator[tuple[Path, dict[str, Any]]]:
    """All subschemas, the root first, and what references point to, each once with its path."""
    seen: set[int] = set()
    waiting: list[tuple[Path, Any]] = [((), root)]
    while waiting:
        path, schema = waiting.pop()
        if not isinstance(schema, dict) or id(schema) in seen:
            continue
        seen.add(id(schema))
        yield path, schema
        waiting += [((*path, *steps), child) for steps, child in reversed(list(subschemas(schema)))]
        if (steps := reference_steps(schema.get("$ref"))) is not None:
            waiting.insert(0, (steps, target_of(root, steps)))


def reference_steps(reference: object) -> Path | None:
    """The steps of a reference within the schema; None: it is none."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    return tuple(unquote(step).replace("~1", "/").replace("~0", "~") for step in reference[2:].split("/"))


def target_of(root: Any, steps: Path) -> Any:
    """What the steps lead to; None: nothing."""
    target = root
    for step in steps:
        target = target.get(step) if isinstance(target, dict) else _item(target, step)
    return target


def _item(values: Any, index: str) -> Any:
    return values[int(index)] if isinstance(values, list) and index.isdecimal() and int(index) < len(values) else None
