"""JSON Schema for what hand-written validators of bodies check: neutral values, and conditions between fields."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

Schema = dict[str, Any]
Conditions = tuple[Schema, ...]

NULL: Schema = {"type": "null"}
_NEUTRAL = "Not supported. Accepted at these values, which request nothing."
_IGNORED = "Accepted without effect."


def requires(field: str, schema: Schema, other: str, value: object) -> Schema:
    """The condition that `other` has this value where `field` is of this schema."""
    return {
        "if": {"required": [field], "properties": {field: schema}},
        "then": {"required": [other], "properties": {other: {"const": value}}},
    }


def entries_require(field: str, other: str, schema: Schema) -> Schema:
    """The condition that `other` is given and of this schema where the list `field` has entries."""
    return {
        "if": {"required": [field], "properties": {field: {"type": "array", "minItems": 1}}},
        "then": {"required": [other], "properties": {other: schema}},
    }


def excludes(field: str, value: object, other: str) -> Schema:
    """The condition that `other` is not given where `field` has this value."""
    return {
        "if": {"required": [field], "properties": {field: {"const": value}}},
        "then": {"properties": {other: NULL}},
    }


def one_of(*fields: str) -> Schema:
    """The condition that exactly one of the fields is given."""
    given = [{"required": [field], "properties": {field: {"not": NULL}}} for field in fields]
    return {"oneOf": given}


def given_unless(field: str, other: str, value: object) -> Schema:
    """The condition that `field` is given unless `other` has this value."""
    return {
        "if": {"not": {"required": [other], "properties": {other: {"const": value}}}},
        "then": {"required": [field], "properties": {field: {"not": NULL}}},
    }


def with_conditions(schema: Schema, conditions: Conditions) -> Schema:
    """The schema of an object, for which all conditions hold, too."""
    if conditions:
        schema["allOf"] = [*conditions]
    return schema


def with_harmless(schema: Schema, unsupported: Mapping[str, tuple[object, ...]], ignored: Collection[str] = ()) -> None:
    """Adds the fields that an object may have although they do nothing."""
    properties = schema.setdefault("properties", {})
    for name, neutral in sorted(unsupported.items()):
        properties.setdefault(name, {"enum": [None, *_distinct(neutral)], "description": _NEUTRAL})
    for name in sorted(ignored):
        properties.setdefault(name, {"description": _IGNORED})


def with_nothing(schema: Schema, nothing: Mapping[str, tuple[object, ...]]) -> None:
    """Allows the values with which a field requests nothing."""
    for name, values in nothing.items():
        known = schema["properties"][name]
        alternatives = known.pop("anyOf", None) or [dict(known)]
        known.clear()
        known["anyOf"] = [*alternatives, {"enum": _distinct(values)}]


def _distinct(values: tuple[object, ...]) -> list[object]:
    """The values without those that JSON does not distinguish from an earlier one, as 1.0 from 1."""
    return [value for index, value in enumerate(values) if value not in values[:index]]
