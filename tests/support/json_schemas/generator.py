"""Random JSON schemas: of OpenAI's strict subset, or with all keywords that a router takes."""

from __future__ import annotations

import random
from typing import Any

from tests.support.json_schemas.samples import FORMATS, PATTERNS, STRINGS

NAMES = ("a", "b", "name", "größe", "x y", 'q"', "n\n", "ab", "key", "id")
_MULTIPLES = (2, 3, 5, 0.5, 0.1, 0.01, 10, 7, 1.5, 0.25)
_NAME_PATTERNS = ("^x-", "^[0-9]+$", "_id$", "^k[a-c]$")
_LITERALS: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    1,
    -7,
    2.5,
    10**12,
    "",
    "a",
    'q"\\',
    "ü\n",
    [],
    [1],
    {},
    {"a": [None]},
)

Schema = dict[str, Any]


class Generator:
    """Makes schemas from a seed."""

    def __init__(self, seed: object, *, is_strict: bool) -> None:
        self._rng, self._is_strict = random.Random(str(seed)), is_strict
        self._defs: dict[str, Any] = {}
        self._pending: list[str] = []

    def schema(self) -> Schema:
        """A whole schema, with its definitions."""
        root = self._object(3) if self._is_strict else self._any(4)
        while self._pending:
            name = self._pending.pop()
            # Behind a definition there is always a way out of it, so that every schema has an instance.
            self._defs[name] = {"anyOf": [self._object(1), {"type": "null"}]}
        if self._defs:
            root["$defs"] = self._defs
        return root

    def _any(self, depth: int) -> Schema:
        makers = [self._string, self._number, self._literal, self._simple]
        if depth > 0:
            makers += [self._object, self._object, self._array, self._any_of, self._reference]
            if not self._is_strict:
                makers += [self._all_of, self._one_of, self._many_types, self._map, self._untyped]
        return self._rng.choice(makers)(depth)

    def _simple(self, _depth: int) -> Schema:
        if not self._is_strict and self._rng.random() < 0.2:
            return {}
        return {"type": self._rng.choice(("boolean", "null", "integer", "number", "string"))}

    def _string(self, _depth: int) -> Schema:
        schema: Schema = {"type": "string"}
        kind = self._rng.choice(("pattern", "format", "length", "plain"))
        samples = STRINGS
        if kind == "pattern":
            schema["pattern"], samples = self._rng.choice(list(PATTERNS.items()))
        elif kind == "format":
            schema["format"], samples = self._rng.choice(list(FORMATS.items()))
        if kind == "length" or self._rng.random() < 0.2:
            length = len(self._rng.choice(samples))
            schema |= self._bounds("minLength", "maxLength", length)
        return self._nullable(schema)

    def _number(self, _depth: int) -> Schema:
        schema: Schema = {"type": self._rng.choice(("integer", "number"))}
        step = self._rng.choice(_MULTIPLES) if self._rng.random() < 0.3 else None
        is_integer = schema["type"] == "integer" or (step or 0.5) == int(step or 0)
        if step is not None:
            schema["multipleOf"] = step
        if step == 0.25:  # 0.50 and a bound exclude each other, as the documentation says.
            return self._nullable(schema)
        # A multiple, also of integers, that lies between both bounds.
        unit = max(step or 1, 1) if schema["type"] == "integer" else step or 1
        middle = self._rng.randrange(-30, 30) * unit * (2 if schema["type"] == "integer" else 1)
        for name, exclusive, sign in (("minimum", "exclusiveMinimum", -1), ("maximum", "exclusiveMaximum", 1)):
            if self._rng.random() < 0.5:
                far = sign * self._rng.choice((2, 10, 37, 1000)) * unit
                bound = round(middle + far, 3)
                schema[self._rng.choice((name, exclusive))] = int(bound) if is_integer else bound
        return self._nullable(schema)

    def _bounds(self, least: str, greatest: str, value: int) -> Schema:
        bounds: Schema = {}
        if self._rng.random() < 0.6:
            bounds[least] = max(0, value - self._rng.randrange(3))
        if self._rng.random() < 0.6:
            bounds[greatest] = value + self._rng.randrange(3)
        return bounds

    def _nullable(self, schema: Schema) -> Schema:
        return schema | {"type": [schema["type"], "null"]} if self._rng.random() < 0.15 else schema

    def _literal(self, _depth: int) -> Schema:
        if self._rng.random() < 0.5:
            return {"const": self._rng.choice(_LITERALS)}
        return {"enum": self._rng.sample(_LITERALS, self._rng.randrange(1, 5))}

    def _object(self, depth: int) -> Schema:
        names = self._rng.sample(NAMES, self._rng.randrange(0, 4))
        schema: Schema = {"type": "object", "properties": {name: self._any(depth - 1) for name in names}}
        if self._is_strict:
            return schema | {"required": names, "additionalProperties": False}
        schema["required"] = [name for name in names if self._rng.random() < 0.5]
        if self._rng.random() < 0.2:
            schema["required"] = sorted({*schema["required"], self._rng.choice(NAMES)})
        schema |= self._others(depth)
        if self._rng.random() < 0.15:
            schema[self._rng.choice(("minProperties", "maxProperties"))] = self._rng.randrange(4)
        return schema

    def _others(self, depth: int) -> Schema:
        """What an object says about properties that it does not name."""
        others: Schema = {}
        if self._rng.random() < 0.25:
            patterns = self._rng.sample(_NAME_PATTERNS, self._rng.randrange(1, 3))
            others["patternProperties"] = {pattern: self._any(depth - 1) for pattern in patterns}
        if (kind := self._rng.random()) < 0.6:
            others["additionalProperties"] = False if kind < 0.4 else self._any(depth - 1)
        return others

    def _map(self, depth: int) -> Schema:
        return {"type": "object", **self._others(depth), **self._bounds("minProperties", "maxProperties", 1)}

    def _array(self, depth: int) -> Schema:
        schema: Schema = {"type": "array", "items": self._any(depth - 1)}
        if not self._is_strict and self._rng.random() < 0.4:
            schema["prefixItems"] = [self._any(depth - 1) for _ in range(self._rng.randrange(1, 4))]
            if self._rng.random() < 0.5:
                schema["items"] = False
        return self._nullable(schema | self._bounds("minItems", "maxItems", self._rng.randrange(3)))

    def _any_of(self, depth: int) -> Schema:
        return {"anyOf": [self._any(depth - 1) for _ in range(self._rng.randrange(1, 4))]}

    def _reference(self, _depth: int) -> Schema:
        if self._rng.random() < 0.3:
            return {"anyOf": [{"$ref": "#"}, {"type": "null"}]}
        name = self._rng.choice(("node", "leaf/~", "größe"))
        if name not in self._defs and name not in self._pending:
            self._pending.append(name)
        escaped = name.replace("~", "~0").replace("/", "~1")
        return {"$ref": f"#/$defs/{escaped}"}

    def _all_of(self, depth: int) -> Schema:
        return {"allOf": [self._any(depth - 1) for _ in range(self._rng.randrange(1, 3))], **self._neighbours(depth)}

    def _one_of(self, depth: int) -> Schema:
        kinds = self._rng.choice((("string", "integer"), ("object", "array", "null"), ("number", "integer")))
        branches = [self._any(0) | {"type": kind} for kind in kinds]
        if self._rng.random() < 0.4:
            branches = [self._tagged(depth, tag) for tag in ("cat", "dog")]
        return {"oneOf": branches, **self._neighbours(depth)}

    def _tagged(self, depth: int, tag: str) -> Schema:
        made = self._object(depth - 1)
        made["properties"] = {"kind": {"const": tag}, **made["properties"]}
        if self._rng.random() < 0.8:
            made["required"] = ["kind", *made["required"]]
        return made

    def _neighbours(self, depth: int) -> Schema:
        return self._untyped(depth - 1) if self._rng.random() < 0.3 else {}

    def _many_types(self, depth: int) -> Schema:
        chosen = ("null", "boolean", "number", "integer", "string", "array", "object")
        return self._untyped(depth) | {"type": self._rng.sample(chosen, self._rng.randrange(1, 4))}

    def _untyped(self, depth: int) -> Schema:
        """Keywords of several types together, which only concern values of theirs."""
        makers = (self._string, self._number, self._object, self._array)
        merged: Schema = {}
        for make in self._rng.sample(makers, self._rng.randrange(1, 3)):
            merged |= make(depth - 1 if depth > 0 else 0)
        merged.pop("type", None)
        return merged
