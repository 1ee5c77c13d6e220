"""What a router does with each keyword of JSON schema: the table of `docs/json-schemas.md`, and texts that prove it.

`python -m tests.support.json_schemas.keywords` writes the table.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdserve.base.errors import RequestError
from router_svc.api.json_grammars import Whitespace, json_grammar

PAGE = Path(__file__).parents[3] / "docs/json-schemas.md"
_HEADER = "| keyword | enforced | refused |\n| --- | --- | --- |\n"
_TABLE = re.compile(re.escape(_HEADER) + r"(?:\|.*\n)*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A use of a keyword. Whether it is enforced or refused is found out."""

    keyword: str
    what: str
    schema: Any
    #: Texts that are accepted, and texts that are not, if the keyword is enforced.
    good: Sequence[str] = ()
    bad: Sequence[str] = ()

    def refusal(self) -> RequestError | None:
        """The error with which a router refuses the schema; None: it takes it."""
        try:
            self.grammar()
        except RequestError as error:
            return error
        return None

    def grammar(self) -> str:
        """The grammar of an object whose property `v` has the schema. Raises `RequestError`."""
        schema = {"type": "object", "properties": {"v": self.schema}, "required": ["v"], "additionalProperties": False}
        return json_grammar(schema, Whitespace(), closes_objects=False, param="schema")


def _case(keyword: str, what: str, schema: Any, good: str = "", bad: str = "") -> Case:
    """Texts are separated by two spaces."""
    return Case(keyword=keyword, what=what, schema=schema, good=good.split("  "), bad=bad.split("  "))


def _object(**keywords: Any) -> dict[str, Any]:
    return {"type": "object", **keywords}


_TAGGED = [_object(properties={"k": {"const": tag}}, required=["k"], additionalProperties=False) for tag in ("a", "b")]
_NODE = {"anyOf": [_object(properties={"next": {"$ref": "#/properties/v"}}, additionalProperties=False), {"const": 0}]}

CASES = (
    _case("`type`", "one, or a list", {"type": ["integer", "null"]}, "1  null", "1.0  true"),
    _case("`enum`", "all values", {"enum": ["a", 1, None, [1]]}, '"a"  1  null  [1]', '"b"  2  [2]'),
    _case("`enum`", "an empty list", {"enum": []}),
    _case("`const`", "all values", {"const": {"a": [1, "b"]}}, '{"a": [1, "b"]}', '{"a": [1]}'),
    _case("`const`", "integers beyond 2^53", {"const": 2**53 + 1}),
    _case("`const`", "control characters but `\\b \\f \\n \\r \\t`", {"const": "\x01"}),
    _case(
        "`properties`, `required`",
        "in the order of the schema",
        _object(properties={"a": {"type": "integer"}, "b": {}}, required=["a"]),
        '{"a": 1}  {"a": 1, "b": 2}  {"a": 1, "c": 2}',
        '{}  {"b": 2, "a": 1}  {"a": 1, "\\u0061": "x"}',
    ),
    _case(
        "`additionalProperties`",
        "a schema, or a boolean",
        _object(additionalProperties={"type": "integer"}),
        '{"a": 1}  {}',
        '{"a": "x"}',
    ),
    _case(
        "`patternProperties`",
        "with expressions of which a name matches one",
        _object(patternProperties={"^a": {"type": "integer"}, "^b": {"type": "string"}}),
        '{"a1": 1, "b1": "x"}  {"c": null}',
        '{"a1": "x"}  {"b1": 1}',
    ),
    _case(
        "`patternProperties`",
        "expressions that could both match",
        _object(patternProperties={"^a": {"type": "integer"}, "b$": {"type": "string"}}),
    ),
    _case(
        "`minProperties`",
        "up to one more than `required` names, if no property is optional",
        _object(properties={"a": {}}, required=["a"], minProperties=2),
        '{"a": 1, "b": 2}',
        '{"a": 1}',
    ),
    _case("`minProperties`", "more than that: unknown names could be equal", _object(minProperties=2)),
    _case(
        "`maxProperties`",
        "if no property is optional",
        _object(properties={"a": {}}, required=["a"], maxProperties=2),
        '{"a": 1, "b": 2}',
        '{"a": 1, "b": 2, "c": 3}',
    ),
    _case("`maxProperties`", "with optional properties", _object(properties={"a": {}, "b": {}}, maxProperties=1)),
    _case("`items`", "a schema, or a boolean", {"type": "array", "items": {"const": 1}}, "[1, 1]  []", "[1, 2]"),
    _case(
        "`prefixItems`",
        "with and without `items`",
        {"type": "array", "prefixItems": [{"const": 1}, {"const": 2}], "items": False},
        "[1]  [1, 2]",
        "[2]  [1, 2, 3]",
    ),
    _case("`minItems`, `maxItems`", "any", {"type": "array", "minItems": 1, "maxItems": 2}, "[1]", "[]  [1, 2, 3]"),
    _case("`uniqueItems`", "`false`", {"type": "array", "uniqueItems": False}, "[1, 1]", "1"),
    _case("`uniqueItems`", "`true`", {"type": "array", "uniqueItems": True}),
    _case("`contains`, `minContains`, `maxContains`", "any", {"type": "array", "contains": {"const": 1}}),
    _case(
        "`minLength`, `maxLength`",
        "in characters, also with `pattern` or `format`",
        {"type": "string", "minLength": 1, "maxLength": 2},
        '"é"  "😀\\n"',
        '""  "abc"',
    ),
    _case(
        "`pattern`",
        "expressions that mean the same in all dialects",
        {"type": "string", "pattern": "^a+$|^b"},
        '"aa"  "bc"',
        '"ab"',
    ),
    _case("`pattern`", "lookaround", {"type": "string", "pattern": "^(?=a)b"}),
    _case("`pattern`", "`\\b`", {"type": "string", "pattern": r"\bword\b"}),
    _case("`pattern`", "backreferences", {"type": "string", "pattern": r"(a)\1"}),
    _case("`pattern`", "what differs between dialects, such as `[a&&b]` or `\\A`", {"pattern": "[a&&b]"}),
    _case("`format`", "`date-time`", {"format": "date-time"}, '"2024-02-29T10:00:00Z"', '"2023-02-29T10:00:00Z"'),
    _case("`format`", "`date`", {"format": "date"}, '"2024-02-29"', '"2024-02-30"  "2023-02-29"  "1900-02-29"'),
    _case("`format`", "`time`", {"format": "time"}, '"10:00:00Z"', '"10:00"  "24:00:00Z"  "10:00:00.1234567890Z"'),
    _case("`format`", "`duration`", {"format": "duration"}, '"P1DT2H"  "P2W"', '"1 day"  "P1234567890D"  "PT"'),
    _case("`format`", "`email`", {"format": "email"}, '"a@b.c"', '"a"'),
    _case("`format`", "`hostname`", {"format": "hostname"}, '"a.b"', '"-a"'),
    _case("`format`", "`ipv4`", {"format": "ipv4"}, '"1.2.3.4"', '"256.1.1.1"'),
    _case("`format`", "`ipv6`", {"format": "ipv6"}, '"::1"', '"1::2::3"'),
    _case("`format`", "`uuid`", {"format": "uuid"}, '"123e4567-e89b-12d3-a456-426614174000"', '"123e4567"'),
    _case("`format`", "`uri`", {"format": "uri"}, '"https://a.b/c"', '"a b"'),
    _case("`format`", "all others", {"format": "regex"}),
    _case(
        "`minimum`, `maximum`, `exclusiveMinimum`, `exclusiveMaximum`",
        "up to 2^53, and wider ones for 64 bits",
        {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.5},
        "0.000001  0.25",
        "0  -0  -1  0.5",
    ),
    _case(
        "`minimum`, `maximum`, `exclusiveMinimum`, `exclusiveMaximum`",
        "those that are not exact as floating-point numbers",
        {"type": "integer", "minimum": 2**53 + 1},
    ),
    _case("`multipleOf`", "up to four digits", {"type": "number", "multipleOf": 0.05}, "0.15  1", "0.07"),
    _case("`multipleOf`", "more digits, or a common multiple in the schema beyond 10,000", {"multipleOf": 123456}),
    _case(
        "`anyOf`",
        "also with other keywords",
        {"anyOf": [{"type": "string"}, {"type": "integer"}], "maxLength": 1},
        '"a"  12',
        '"ab"  null',
    ),
    _case(
        "`oneOf`",
        "if types or a required `const` distinguish the branches",
        {"oneOf": _TAGGED},
        '{"k": "a"}',
        '{"k": 1}',
    ),
    _case("`oneOf`", "branches that could overlap", {"oneOf": [{"type": "number"}, {"type": "integer"}]}),
    _case(
        "`allOf`",
        "also with other keywords",
        {"allOf": [{"minLength": 1}, {"maxLength": 2}], "type": "string"},
        '"a"',
        '""  "abc"',
    ),
    _case("`not`, `if`, `then`, `else`", "any", {"not": {"type": "string"}}),
    _case("`$ref`, `$defs`", "`#` and `#/...`, also recursive ones", _NODE, '{"next": {"next": 0}}  {}', '{"next": 1}'),
    _case("`$ref`, `$defs`", "others", {"$ref": "https://example.com/a.json"}),
    _case("`$dynamicRef`", "any", {"$dynamicRef": "#a"}),
    _case("`$id`", "within a schema", {"$id": "b", "type": "string"}),
    _case("`propertyNames`", "any", _object(propertyNames={"pattern": "a"})),
    _case("`dependentRequired`, `dependentSchemas`", "any", _object(dependentRequired={"a": ["b"]})),
    _case("`unevaluatedItems`, `unevaluatedProperties`", "any", _object(unevaluatedProperties=False)),
)


def table() -> str:
    """The table, as it should be in the page."""
    columns: dict[str, tuple[list[str], list[str]]] = {}
    for case in CASES:
        columns.setdefault(case.keyword, ([], []))[case.refusal() is not None].append(case.what)
    rows = [f"| {keyword} | {', '.join(takes)} | {', '.join(not_)} |\n" for keyword, (takes, not_) in columns.items()]
    return _HEADER + "".join(row.replace("|  |", "| |") for row in rows)


def published() -> str:
    """The table of the page."""
    found = _TABLE.search(PAGE.read_text(encoding="utf-8"))
    assert found is not None, f"{PAGE} has no table of keywords"
    return found[0]


def main() -> None:
    """Writes the table."""
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(_TABLE.sub(lambda _: table(), text), encoding="utf-8")
    print(json.dumps({case.keyword + " " + case.what: str(case.refusal() or "") for case in CASES}, indent=1))


if __name__ == "__main__":
    main()
