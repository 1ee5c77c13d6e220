"""A JSON schema in the words in which llguidance 1.9 enforces exactly what the schema says. Pure.

Found by tests that compare it with the `jsonschema` library. What no words can change is in `json_limits`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from decimal import Decimal
from typing import Any
from urllib.parse import quote

from router_svc.api.json_keywords import is_number, reachable, reference_steps
from router_svc.api.json_patterns import pattern_for_library

_DIGITS = "[0-9]{1,9}"
_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9][0-9]|[0-9][1-9][0-9]{2}|[1-9][0-9]{3})"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DAYS = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = f"(?:{_YEAR}-{_DAYS}|{_LEAP_YEAR}-02-29)"
_TIME = rf"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.{_DIGITS})?(?:[Zz]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_OF_TIME = f"T(?:{_DIGITS}H(?:{_DIGITS}M(?:{_DIGITS}S)?)?|{_DIGITS}M(?:{_DIGITS}S)?|{_DIGITS}S)"
_OF_DATE = f"(?:{_DIGITS}Y(?:{_DIGITS}M(?:{_DIGITS}D)?)?|{_DIGITS}M(?:{_DIGITS}D)?|{_DIGITS}D)"
#: Formats of which the library has 29 February in each year, the year 0, or digits without end. RFC 3339.
_FORMATS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}[Tt]{_TIME}$",
    "duration": f"^P(?:{_DIGITS}W|{_OF_DATE}(?:{_OF_TIME})?|{_OF_TIME})$",
}
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
#: Between bounds less than 1 apart, an integer that is excluded is allowed. Numbers closer to it are excluded, too.
_STEP = Decimal("0.000001")
#: Integers to which the step can be added.
_MAX_STEPPED = 10**9


def for_library(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The same schema, with URIs as references, and without a keyword that requests nothing."""
    made = copy.deepcopy(dict(schema))
    subschemas = [subschema for _, subschema in reachable(made)]
    merges = any(map(_merges_bounds, subschemas))
    for subschema in subschemas:
        if (steps := reference_steps(subschema.get("$ref"))) is not None:
            subschema["$ref"] = "#/" + "/".join(quote(step.replace("~", "~0").replace("/", "~1"), "") for step in steps)
        if subschema.get("uniqueItems") is False:
            del subschema["uniqueItems"]
        _replace_patterns(subschema)
        _replace_boolean_bounds(subschema)
        if merges or _are_close(subschema):
            _move_bounds(subschema)
    return made


def _replace_patterns(schema: dict[str, Any]) -> None:
    if isinstance(pattern := schema.get("pattern"), str):
        schema["pattern"] = pattern_for_library(pattern)
    if isinstance(named := schema.get("patternProperties"), dict):
        schema["patternProperties"] = {pattern_for_library(pattern): child for pattern, child in named.items()}
    if isinstance(name := schema.get("format"), str) and name in _FORMATS:
        del schema["format"]
        if "pattern" not in schema:
            schema["pattern"] = _FORMATS[name]
        elif isinstance(others := schema.setdefault("allOf", []), list):  # If it is none, the library refuses it.
            others.append({"pattern": _FORMATS[name]})


def _merges_bounds(schema: Mapping[str, Any]) -> bool:
    """Whether bounds of other subschemas may apply together with its own."""
    has_bounds = any(name in schema for name in BOUNDS)
    return "allOf" in schema or (has_bounds and any(name in schema for name in ("$ref", "anyOf", "oneOf")))


def _are_close(schema: Mapping[str, Any]) -> bool:
    lower = [value for name in ("minimum", "exclusiveMinimum") if is_number(value := schema.get(name))]
    upper = [value for name in ("maximum", "exclusiveMaximum") if is_number(value := schema.get(name))]
    return bool(lower and upper) and max(lower) + 1 > min(upper)


def _move_bounds(schema: dict[str, Any]) -> None:
    if schema.get("type") == "integer":
        return
    for exclusive, inclusive, step, strictest in (
        ("exclusiveMinimum", "minimum", _STEP, max),
        ("exclusiveMaximum", "maximum", -_STEP, min),
    ):
        bound, other = schema.get(exclusive), schema.get(inclusive)
        if is_number(bound) and bound == int(bound) and abs(bound) <= _MAX_STEPPED:
            moved = float(Decimal(int(bound)) + step)
            if other is None or is_number(other):
                del schema[exclusive]
                schema[inclusive] = moved if other is None else strictest(moved, other)


def _replace_boolean_bounds(schema: dict[str, Any]) -> None:
    """As draft 4 has them: `"exclusiveMinimum": true` says that `minimum` is excluded."""
    for exclusive, inclusive in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if schema.get(exclusive) is True and is_number(schema.get(inclusive)):
            schema[exclusive] = schema.pop(inclusive)
