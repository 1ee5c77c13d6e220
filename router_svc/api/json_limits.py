"""What the grammar of a JSON schema would not enforce exactly, or only at the price of minutes.

`llguidance` refuses what it does not know. These are the cases in which it would accept an output that the schema does
not: found by tests that compare it with the `jsonschema` library, and refused here.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

from router_svc.api.json_keywords import Path, is_number, reachable, reference_steps, target_of
from router_svc.api.json_patterns import pattern_problem

#: Integers beyond it are not exact as floating-point numbers, which is how bounds are read.
_MAX_EXACT = 2**53
_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1
#: Characters of a text. The library gives up in the middle of much longer ones.
_MAX_LITERAL = 20_000
#: The states of an automaton that finds multiples of a number, for all of a schema: about 30 ms.
_MAX_MULTIPLE = 10_000


def not_enforced(root: Mapping[str, Any]) -> tuple[Path, str] | None:
    """The path of the first keyword that would not be enforced, and why; None: all are."""
    if (endless := _endless(root)) is not None:
        return endless, "it refers to itself without end"
    multiples: dict[Decimal, Path] = {}
    for path, schema in reachable(root):
        for keyword, problem in _problems(schema):
            return (*path, keyword), problem
        if is_number(multiple := schema.get("multipleOf")):
            multiples.setdefault(_coefficient(multiple), (*path, "multipleOf"))
    common = 1
    for coefficient, path in multiples.items():
        common = math.lcm(common, int(coefficient) or 1)
        if common > _MAX_MULTIPLE:
            return path, f"the values of `multipleOf` have a common multiple beyond {_MAX_MULTIPLE}"
    return None


def _endless(root: Mapping[str, Any]) -> Path | None:
    """The path of a keyword with which a value would have to be one of itself; None: there is none."""
    found = list(reachable(root))
    users: dict[int, list[dict[str, Any]]] = {}
    for _, schema in found:
        for child in _applied(schema, root):
            users.setdefault(id(child), []).append(schema)
    ending: set[int] = set()
    # First in, first out, and each once: a schema of many others is not looked at for each of them.
    waiting = OrderedDict((id(schema), schema) for _, schema in reversed(found))
    while waiting:
        _, schema = waiting.popitem(last=False)
        if id(schema) not in ending and _needs(schema, root, ending) is None:
            ending.add(id(schema))
            waiting.update((id(user), user) for user in users.get(id(schema), ()))
    for path, schema in found:
        if (keyword := _needs(schema, root, ending)) is not None:
            return (*path, keyword)
    return None


def _needs(schema: Mapping[str, Any], root: Mapping[str, Any], ending: set[int]) -> str | None:
    """The keyword that applies a schema to the same value which is not among the `ending` ones; None: all are."""

    def ends(child: object) -> bool:
        return not isinstance(child, dict) or id(child) in ending

    if not ends(_target(schema, root)):
        return "$ref"
    if not all(map(ends, _list(schema, "allOf"))):
        return "allOf"
    for name in ("anyOf", "oneOf"):
        if (some := _list(schema, name)) and not any(map(ends, some)):
            return name
    return None


def _applied(schema: Mapping[str, Any], root: Mapping[str, Any]) -> list[object]:
    """All that is applied to the same value as the schema."""
    return [_target(schema, root), *(child for name in ("allOf", "anyOf", "oneOf") for child in _list(schema, name))]


def _target(schema: Mapping[str, Any], root: Mapping[str, Any]) -> object:
    steps = () if schema.get("$ref") == "#" else reference_steps(schema.get("$ref"))
    return None if steps is None else target_of(root, steps)


def _list(schema: Mapping[str, Any], name: str) -> list[object]:
    return value if isinstance(value := schema.get(name), list) else []


def _problems(schema: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for keyword in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
        if is_number(value := schema.get(keyword)) and not _is_exact_bound(keyword, value):
            yield keyword, f"{value} is not exact as a floating-point number. Take a bound up to {_MAX_EXACT}"
    for keyword in ("const", "enum"):
        if keyword in schema and (problem := _literal_problem(schema[keyword])):
            yield keyword, problem
    if isinstance(pattern := schema.get("pattern"), str) and (problem := pattern_problem(pattern)):
        yield "pattern", problem
    if isinstance(patterns := schema.get("patternProperties"), dict):
        for pattern in patterns:
            if problem := pattern_problem(pattern):
                yield "patternProperties", problem
    least, required = schema.get("minProperties"), schema.get("required")
    known = len({name for name in required if isinstance(name, str)}) if isinstance(required, list) else 0
    if isinstance(least, int) and least > known + 1:
        yield (
            "minProperties",
            (f"{least} properties are {least - known} more than `required` names, and unknown names could be equal"),
        )


def _is_exact_bound(keyword: str, value: float) -> bool:
    if abs(value) <= _MAX_EXACT:
        return True
    # Bounds of integers end at those of 64 bits, which only makes the outer ones stricter.
    if (keyword == "maximum" and value >= _INT64_MAX) or (keyword == "minimum" and value <= _INT64_MIN):
        return True
    return keyword in ("minimum", "maximum") and float(value) == value


def _literal_problem(value: Any) -> str:
    """Why a value of `const` or `enum` cannot be written, or would stand for others; empty: it can."""
    if isinstance(value, dict):
        return next(filter(None, map(_literal_problem, value.values())), "")
    if isinstance(value, list):
        return next(filter(None, map(_literal_problem, value)), "")
    if isinstance(value, str) and any(character < " " and character not in "\b\f\n\r\t" for character in value):
        return "it has a control character that could only be written as \\u"
    if isinstance(value, str) and len(value) > _MAX_LITERAL:
        return f"it has {len(value)} characters, which is more than {_MAX_LITERAL}"
    if isinstance(value, str) and "\x7f" in value:
        return "it has a control character, U+007F"
    if is_number(value) and abs(value) > _MAX_EXACT:
        return f"{value} is beyond {_MAX_EXACT}"
    return ""


def _coefficient(multiple: float) -> Decimal:
    """The digits of a number as an integer: 25 for 0.25, 100 for 100."""
    value = Decimal(str(abs(multiple))).normalize()
    exponent = value.as_tuple().exponent
    assert isinstance(exponent, int), "JSON has neither NaN nor infinities"
    return value.scaleb(-exponent) if exponent < 0 else value
