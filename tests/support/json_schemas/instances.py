"""Random values that a JSON schema accepts, made from the schema alone."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from decimal import Decimal
from typing import Any

from router_svc.api.json_keywords import reference_steps, target_of
from tests.support.json_schemas.oracle import Oracle
from tests.support.json_schemas.samples import FORMATS, PATTERNS, STRINGS

_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_LITERALS = ("const", "enum")
#: Keywords whose branches have been chosen when a value is.
_WITH_SCHEMAS = ("allOf", "anyOf", "oneOf", "$ref", "$defs")
#: Names of properties that no schema names, some of which match the expressions of the generator.
_OTHER_NAMES = ("other", "x-1", "12", "u_id", "ka")
#: Depth from which on values are as small as they may be.
_DEEP = 4
_MAX_DEPTH, _TRIES = 12, 30


class _NoInstance(Exception):
    """What has been chosen so far has none."""


def instances(root: Mapping[str, Any], rng: random.Random, count: int) -> list[Any]:
    """Up to `count` values that the schema accepts, their properties in the order of the schema.

    `as_text` writes one as a grammar allows it. There are fewer where too few of the tries fit together.
    """
    oracle, found = Oracle(root), list[Any]()
    for _ in range(count * _TRIES):
        with suppress(_NoInstance):
            value = _value([root], root, rng, 0)
            if oracle.accepts(as_text(value)):
                found.append(value)
        if len(found) == count:
            break
    return found


def as_text(value: Any, **options: Any) -> str:
    """An instance as JSON."""
    return re.sub(r'"<#([^#]*)#>"', r"\1", json.dumps(value, ensure_ascii=False, **options))


def _value(schemas: Sequence[Any], root: Any, rng: random.Random, depth: int) -> Any:
    """A value for all of these schemas, if the choices on the way to it fit together."""
    if depth > _MAX_DEPTH:
        raise _NoInstance
    flat = [one for schema in schemas for one in _flattened(schema, root, rng, depth)]
    for one in flat:
        for name in _LITERALS:
            if name in one:
                return rng.choice(one[name] if name == "enum" else [one[name]])
    match _type(flat, rng, depth):
        case "object":
            return _object(flat, root, rng, depth)
        case "array":
            return _array(flat, root, rng, depth)
        case "string":
            return _string(flat, rng)
        case "integer":
            return _number(flat, rng, is_integer=True)
        case "number":
            return _number(flat, rng, is_integer=False)
        case kind:
            return {"null": None, "boolean": rng.random() < 0.5}[kind]


def _flattened(schema: Any, root: Any, rng: random.Random, depth: int) -> Iterator[Mapping[str, Any]]:
    """The schema and all that apply with it, of branches one, in the order in which they name properties."""
    if schema is False or depth > _MAX_DEPTH:
        raise _NoInstance
    if schema is True:
        return
    for name, value in schema.items():
        if name == "properties":
            yield {name: value}
        for child in _applying(name, value, root, rng, depth):
            yield from _flattened(child, root, rng, depth + 1)
    yield schema


def _applying(name: str, value: Any, root: Any, rng: random.Random, depth: int) -> Iterator[Any]:
    match name:
        case "allOf":
            yield from value
        case "anyOf" | "oneOf":
            # The generator puts what ends a recursion last.
            yield value[-1] if depth > _DEEP else rng.choice(value)
        case "$ref":
            steps = reference_steps(value)
            yield root if steps is None else target_of(root, steps)


def _type(flat: Sequence[Mapping[str, Any]], rng: random.Random, depth: int) -> str:
    types = [*_TYPES]
    for one in flat:
        stated = one.get("type", _TYPES)
        stated = {stated} if isinstance(stated, str) else {*stated}
        if "number" in stated:
            stated.add("integer")
        types = [each for each in types if each in stated]
    if not types:
        raise _NoInstance
    return types[0] if depth > _DEEP else rng.choice(types)


def _object(flat: Sequence[Mapping[str, Any]], root: Any, rng: random.Random, depth: int) -> dict[str, Any]:
    named = [*dict.fromkeys(name for one in flat for name in one.get("properties", {}))]
    required = {name for one in flat for name in one.get("required", ())}
    minimum = max((one.get("minProperties", 0) for one in flat), default=0)
    names = [name for name in named if name in required or (depth <= _DEEP and rng.random() < 0.5)]
    others = [name for name in dict.fromkeys((*sorted(required), *_OTHER_NAMES)) if name not in named]
    for name in others:
        if name in required or len(names) < minimum or (depth <= _DEEP and rng.random() < 0.1):
            names.append(name)
    made = {}
    for name in names:
        # Each once: a schema that is named twice would take two branches of its `anyOf`.
        applying = {id(schema): schema for one in flat for schema in _of_property(one, name)}
        made[name] = _value([*applying.values()], root, rng, depth + 1)
    return made


def _of_property(schema: Mapping[str, Any], name: str) -> list[Any]:
    """The schemas for a property of this name."""
    found = [schema["properties"][name]] if name in schema.get("properties", {}) else []
    found += [each for pattern, each in schema.get("patternProperties", {}).items() if re.search(pattern, name)]
    return found or [schema.get("additionalProperties", True)]


def _array(flat: Sequence[Mapping[str, Any]], root: Any, rng: random.Random, depth: int) -> list[Any]:
    minimum = max((one.get("minItems", 0) for one in flat), default=0)
    maximum = min((one.get("maxItems", 3) for one in flat), default=3)
    count = minimum if depth > _DEEP else min(maximum, minimum + rng.randrange(3))
    made = []
    for index in range(count):
        applying = []
        for one in flat:
            first = one.get("prefixItems", ())
            applying.append(first[index] if index < len(first) else one.get("items", True))
        made.append(_value(applying, root, rng, depth + 1))
    return made


def _string(flat: Sequence[Mapping[str, Any]], rng: random.Random) -> str:
    samples = [*STRINGS, *("x" * count for count in range(16))]
    for one in flat:
        samples += PATTERNS.get(one.get("pattern", ""), FORMATS.get(one.get("format", ""), ()))
    return _fitting(flat, samples, rng)


def _number(flat: Sequence[Mapping[str, Any]], rng: random.Random, *, is_integer: bool) -> Any:
    stated = [Decimal(str(one[name])) for one in flat for name in ("multipleOf", *_BOUNDS) if name in one]
    step = max((Decimal(str(one["multipleOf"])) for one in flat if "multipleOf" in one), default=Decimal(1))
    bounds = [Decimal(str(one[name])) for one in flat for name in _BOUNDS if name in one] or [Decimal(0)]
    made = [
        (bound // each + count) * each for bound in bounds for each in (step, step * 100) for count in range(-40, 41)
    ]
    if is_integer:
        made = [value for value in made if value == int(value)]
    number = _fitting(flat, [int(value) if value == int(value) else float(value) for value in made], rng)
    if number == int(number):
        return int(number)
    decimals = max(-int(value.as_tuple().exponent) for value in (*stated, Decimal(str(number))))
    return f"<#{number:.{decimals}f}#>"


def _fitting(flat: Sequence[Mapping[str, Any]], values: Sequence[Any], rng: random.Random) -> Any:
    """One of the values that these schemas accept, as far as they are not about what is in a value."""
    own = [{name: one[name] for name in one if name not in _WITH_SCHEMAS} for one in flat]
    oracle = Oracle({"allOf": own or [True]})
    fitting = [value for value in values if oracle.accepts(json.dumps(value))]
    if not fitting:
        raise _NoInstance
    return rng.choice(fitting)
