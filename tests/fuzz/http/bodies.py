"""Random bodies that an OpenAPI document allows and a small model can serve, and such bodies with damage."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

from router_svc.api.body import CACHE_SALT
from tests.fuzz.files.mutations import damaged_json
from tests.support.described import Description, Schema
from tests.support.tiny_model import NAME, VOCAB_SIZE

_CHARACTERS = "aZ09 .,<|>{}%\\\"'\n\t\r\x00\x1b\x7fé٣ß語\u200b\u202e\u2028\ufeff\ufffd😀\U0010ffff"
_TEXTS = ("<|end|>", "<|start|>", "{{ x }}", "{% for", "data: [DONE]\n\n", "null", "0", "</script>", "../..")
#: Texts for patterns. A document with another pattern fails here, so that it is added.
_PATTERNS: Mapping[str, tuple[str, ...]] = {
    CACHE_SALT: ("a", "tenant one", "é語", "x" * 128, "\n", "a:b"),
    "^[0-9]{1,10}$": tuple(map(str, (0, 1, 9, 65, VOCAB_SIZE - 1))),
    "^[A-Za-z_][A-Za-z0-9_]*$": ("mood", "x", "_", "enable_thinking", "X1", "__class__", "loop", "namespace"),
}
#: At most this many optional fields: with more, conditions between them hardly hold.
_MAX_OPTIONAL = 6
_TRIES = 50
_LONGEST_TEXT, _LONGEST_LIST = 40, 4


class BodyMaker:
    """Makes bodies for the operations of a document."""

    def __init__(self, description: Description) -> None:
        self._description = description
        self._schemas: Mapping[str, Schema] = description.document["components"]["schemas"]
        self.paths = [path for (_, path), each in description.operations.items() if "requestBody" in each]

    def allowed(self, path: str, random: Random) -> dict[str, Any]:
        """A body that the document allows. Only its model may refuse it, and the tiny one does not."""
        content = self._description.operations["POST", path]["requestBody"]["content"]
        for _ in range(_TRIES):
            body: dict[str, Any] = self._value(content["application/json"]["schema"], random)
            _fit(path, body, random)
            if not self._description.body_errors(path, body):
                return body
        raise AssertionError(f"no body for {path} in {_TRIES} tries: {body}")

    def damaged(self, path: str, random: Random) -> bytes:
        """A body with some of its values changed, or with damaged bytes."""
        return damaged_json(json.dumps(self.allowed(path, random)).encode(), random)

    def _value(self, schema: Schema, random: Random) -> Any:
        if "$ref" in schema:
            return self._value(self._schemas[schema["$ref"].rpartition("/")[2]], random)
        if "anyOf" in schema:
            return self._value(random.choice(schema["anyOf"]), random)
        if "enum" in schema:
            return random.choice(schema["enum"])
        if "const" in schema:
            return schema["const"]
        make: Callable[[Schema, Random], Any] = {
            "object": self._object,
            "array": self._array,
            "string": _text,
            "integer": _integer,
            "number": _number,
            "boolean": lambda _, random: random.random() < 0.5,
            "null": lambda *_: None,
            None: _anything,
        }[schema.get("type")]
        return make(schema, random)

    def _object(self, schema: Schema, random: Random) -> dict[str, Any]:
        properties = schema.get("properties", {})
        required = schema.get("required", [])
        optional = [name for name in properties if name not in required]
        names = [*required, *random.sample(optional, min(len(optional), random.randint(0, _MAX_OPTIONAL)))]
        found = {name: self._value(properties[name], random) for name in names}
        for condition in schema.get("allOf", ()):
            self._choose(condition.get("oneOf", ()), properties, found, random)
        others = schema.get("additionalProperties")
        if isinstance(others, dict):
            keys = [self._value(schema.get("propertyNames", {"type": "string"}), random) for _ in range(_few(random))]
            found |= {key: self._value(others, random) for key in keys[: schema.get("maxProperties", len(keys))]}
        return found

    def _choose(self, options: Sequence[Schema], properties: Schema, found: dict[str, Any], random: Random) -> None:
        """Gives a value to one of the fields of which one is required, and removes the others."""
        names = [name for option in options for name in option["required"]]
        for name in names:
            found.pop(name, None)
        if names:
            name = random.choice(names)
            given = [each for each in properties[name]["anyOf"] if each.get("type") != "null"]
            found[name] = self._value(random.choice(given), random)

    def _array(self, schema: Schema, random: Random) -> list[Any]:
        low = schema.get("minItems", 0)
        high = min(schema.get("maxItems", _LONGEST_LIST), low + _LONGEST_LIST)
        return [self._value(schema["items"], random) for _ in range(random.randint(low, high))]


def _few(random: Random) -> int:
    return random.choice((0, 1, 1, 2, 3))


def _text(schema: Schema, random: Random) -> str:
    if "pattern" in schema:
        return random.choice(_PATTERNS[schema["pattern"]])
    low, high = schema.get("minLength", 0), min(schema.get("maxLength", _LONGEST_TEXT), _LONGEST_TEXT)
    fitting = [text for text in _TEXTS if low <= len(text) <= high]
    if fitting and random.random() < 0.2:
        return random.choice(fitting)
    return "".join(random.choice(_CHARACTERS) for _ in range(random.randint(low, random.choice((low, 3, high)))))


def _integer(schema: Schema, random: Random) -> int:
    low, high = schema.get("minimum", -(2**70)), schema.get("maximum", 2**70)
    return random.choice([each for each in (low, high, low + 1, high - 1, 0, 1, 2, 17) if low <= each <= high])


def _number(schema: Schema, random: Random) -> float:
    low, high = schema.get("minimum", schema.get("exclusiveMinimum", -1e308)), schema.get("maximum", 1e308)
    above = schema.get("exclusiveMinimum", low - 1)
    choices = (low, high, 0, 1, 0.5, 1e-320, 1e-9, 0.1 + 0.2, random.uniform(low, high))
    return random.choice([each for each in choices if low <= each <= high and each > above])


def _anything(_: Schema, random: Random) -> Any:
    return random.choice((None, True, 0, -1.5, "x", [], {}, [[1], {"a": None}], {"type": "text", "more": ["\x00"]}))


def _fit(path: str, body: dict[str, Any], random: Random) -> None:
    """Changes what depends on the model: names, sizes, and ids of the vocabulary."""
    for name, value in body.items():
        if name in _FITTING and value is not None:
            body[name] = _FITTING[name](value, random)
    if "max_tokens" in body and "max_completion_tokens" in body:
        body["max_completion_tokens"] = body["max_tokens"]
    for message in body.get("messages") or ():
        # The tiny model's template refuses this role.
        message["role"] = "user" if message["role"] == "tool" else message["role"]
        if message["role"] != "assistant" and message.get("content") is None:
            message["content"] = random.choice(_TEXTS)
    if path == "/v1/completions":
        body["prompt"] = _prompt(body["prompt"])


def _prompt(prompt: Any) -> Any:
    if isinstance(prompt, list):
        return [_prompt(each) if not isinstance(each, int) else each % VOCAB_SIZE for each in prompt]
    return prompt


_FITTING: Mapping[str, Callable[[Any, Random], Any]] = {
    "model": lambda _, random: NAME,
    "max_tokens": lambda _, random: random.choice((1, 2, 14, 30)),
    "max_completion_tokens": lambda _, random: random.choice((1, 2, 14, 30)),
    "min_tokens": lambda _, random: random.choice((0, 1)),
    "n": lambda value, random: min(value, random.choice((1, 2, 8))),
    "tokens": lambda value, _: [each % VOCAB_SIZE for each in value],
    "stop_token_ids": lambda value, _: [each % VOCAB_SIZE for each in value],
    "messages": lambda value, _: value[:_LONGEST_LIST],
}
