"""Random bodies that an OpenAPI document allows and a small model can serve, and such bodies with damage."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

from router_svc.api.body import CACHE_SALT
from router_svc.api.files.files_api import FILE_ID
from tests.fuzz.files.mutations import damaged_json
from tests.support.described import Description, Schema
from tests.support.tiny_model import NAME, VOCAB_SIZE

_CHARACTERS = "aZ09 .,<|>{}%\\\"'\n\t\r\x00\x1b\x7fé٣ß語\u200b\u202e\u2028\ufeff\ufffd😀\U0010ffff"
_JSON = "application/json"
_TEXTS = ("<|end|>", "<|start|>", "{{ x }}", "{% for", "data: [DONE]\n\n", "null", "0", "</script>", "../..")
#: Texts for patterns. A document with another pattern fails here, so that it is added.
_PATTERNS: Mapping[str, tuple[str, ...]] = {
    CACHE_SALT: ("a", "tenant one", "é語", "x" * 128, "\n", "a:b"),
    "^[0-9]{1,10}$": tuple(map(str, (0, 1, 9, 65, VOCAB_SIZE - 1))),
    "^[A-Za-z0-9_-]{1,64}$": ("answer", "a-b", "x" * 64),
    "^[A-Za-z0-9_.-]{1,128}$": ("put", "get_weather", "a.b-c", "x" * 128),
    FILE_ID: ("file-" + "0" * 32,),
    "^[A-Za-z_][A-Za-z0-9_]*$": ("mood", "x", "_", "enable_thinking", "X1", "__class__", "loop", "namespace"),
}
#: At most this many optional fields: with more, conditions between them hardly hold.
_MAX_OPTIONAL = 6
_TRIES = 50
_LONGEST_TEXT, _LONGEST_LIST = 40, 4


def _media(operation: Schema) -> Mapping[str, object]:
    """The bodies of an operation, by their type."""
    return operation.get("requestBody", {}).get("content", {})  # type: ignore[no-any-return]


class BodyMaker:
    """Makes bodies for the operations of a document."""

    def __init__(self, description: Description) -> None:
        self._description = description
        self._schemas: Mapping[str, Schema] = description.document["components"]["schemas"]
        operations = description.operations.items()
        # Batches need a store, which the router does not have.
        self.paths = [path for (_, path), each in operations if _JSON in _media(each) and path != "/v1/batches"]

    def allowed(self, path: str, random: Random) -> dict[str, Any]:
        """A body that the document allows. Only its model may refuse it, and the tiny one does not."""
        body = self._made(path, random)
        # Their texts alone are more than its context.
        dropped = {"tools", "tool_choice"}
        # Only some routers take the one, and only models that think the other.
        dropped |= {"chat_template", "thinking_token_budget"}
        return {name: value for name, value in body.items() if name not in dropped}

    def _made(self, path: str, random: Random) -> dict[str, Any]:
        content = self._description.operations["POST", path]["requestBody"]["content"]
        for _ in range(_TRIES):
            body: dict[str, Any] = self._value(content["application/json"]["schema"], random)
            _fit(path, body, random)
            if not self._description.body_errors(path, body):
                return body
        raise AssertionError(f"no body for {path} in {_TRIES} tries: {body}")

    def damaged(self, path: str, random: Random) -> bytes:
        """A body with some of its values changed, or with damaged bytes."""
        return damaged_json(json.dumps(self._made(path, random)).encode(), random)

    def _value(self, schema: Schema, random: Random) -> Any:
        if "$ref" in schema:
            return self._value(self._schemas[schema["$ref"].rpartition("/")[2]], random)
        for kinds in ("anyOf", "oneOf"):
            if kinds in schema:
                return self._value(random.choice(schema[kinds]), random)
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
            named = {"type": "string"} | schema.get("propertyNames", {})
            keys = [self._value(named, random) for _ in range(_few(random))]
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


#: What says what an output has to match. Whether a grammar is valid, no schema says.
_STRUCTURED = {
    "response_format": ({"type": "text"}, {"type": "json_object"}),
    "structured_outputs": (
        {"regex": "a+"},
        {"choice": ["a", "b"]},
        {"json": {"type": "object"}},
        {"json_object": True},
    ),
    "guided_json": ({"type": "object"}, '{"type": "array"}'),
    "guided_regex": ("[a-z]+",),
    "guided_choice": (["a", "é"],),
    "guided_grammar": ('start: "a"', 'root ::= "a"'),
}


def _fit_structure(body: dict[str, Any], random: Random) -> None:
    """At most one thing that the output has to match, which is valid."""
    given = [name for name in _STRUCTURED if body.get(name) is not None]
    for name in given:
        del body[name]
    if given:
        name = random.choice(given)
        body[name] = random.choice(_STRUCTURED[name])
    body.pop("guided_whitespace_pattern", None)


def _fit(path: str, body: dict[str, Any], random: Random) -> None:
    """Changes what depends on the model: names, sizes, and ids of the vocabulary."""
    for name, value in body.items():
        if name in _FITTING and value is not None:
            body[name] = _FITTING[name](value, random)
    if "max_tokens" in body and "max_completion_tokens" in body:
        body["max_completion_tokens"] = body["max_tokens"]
    if path.startswith("/api/"):
        _fit_ollama(body)
        return
    if path.startswith("/v1/messages"):
        _fit_messages(body, random)
        return
    if path != "/v1/rerank":  # The tiny model's template shows none.
        body.pop("documents", None)
    for message in body.get("messages") or ():
        # The tiny model's template refuses this role.
        message["role"] = "user" if message["role"] == "developer" else message["role"]
        if message["role"] != "assistant" and message.get("content") is None:
            message["content"] = random.choice(_TEXTS)
    _fit_structure(body, random)
    if path == "/v1/responses":
        _fit_response(body)
    if path == "/v1/completions":
        body["prompt"] = _prompt(body["prompt"])
    _fit_pooling(path, body, random)


def _fit_pooling(path: str, body: dict[str, Any], random: Random) -> None:
    if path == "/v1/embeddings":
        body["input"] = _prompt(body["input"])
        body.pop("prompt_name", None)  # The tiny model has none.
    if path == "/v1/decisions":
        _fit_decision(body)
    if path == "/v1/score":
        body["text_1"] = random.choice(_TEXTS)


def _fit_decision(body: dict[str, Any]) -> None:
    """Short texts, and choices of which each is there once. The tiny model has labels for 52."""
    body |= {name: _shorter(body[name]) for name in ("input", "questions")}
    _fit_calls(body["input"])
    for item in body["input"] if isinstance(body["input"], list) else ():
        if item.get("role") == "developer":  # The tiny model's template refuses it.
            item["role"] = "system"
    for question in body["questions"]:
        for name in ("choices", "levels"):
            if name in question:
                question[name] *= 2
        for index, each in enumerate(question.get("choices", ())):
            question["choices"][index] = each | {"value": f"v{index}"}


def _fit_calls(items: Any) -> None:
    """Short names of calls, which with their namespaces have a common limit."""
    for item in items if isinstance(items, list) else ():
        item |= {name: item[name][:40] for name in ("name", "namespace") if item.get(name)}


def _fit_response(body: dict[str, Any]) -> None:
    """Nothing that needs a store, short and different names, and a choice that names none: no schema says these."""
    _fit_calls(body["input"])
    if isinstance(body["input"], list):  # Of items that are left out, no conversation remains.
        body["input"].append({"role": "user", "content": "And now?"})
    for name in ("store", "background", "previous_response_id"):
        body.pop(name, None)
    for index, tool in enumerate(body.get("tools") or ()):
        for each in [tool, *tool.get("tools", ())]:
            each["name"] = f"tool_{index}"
        for number, each in enumerate(tool.get("tools", ())):
            each["name"] = f"member_{number}"
    if not body.get("tools") or not isinstance(body.get("tool_choice"), str):
        body.pop("tool_choice", None)


def _fit_messages(body: dict[str, Any], random: Random) -> None:
    """Ends the conversation with what can be answered, within the tiny model's context."""
    body |= {name: _shorter(body[name]) for name in ("messages", "system") if name in body}
    last = random.choice(("user", "assistant"))
    body["messages"].append({"role": last, "content": "And now?"})
    if last == "assistant":
        body["messages"][-1:-1] = [{"role": "user", "content": "Well?"}]


def _fit_ollama(body: dict[str, Any]) -> None:
    """Short texts, of a model that does not think, and a last message that can be answered."""
    body.pop("think", None)
    body |= {name: _shorter(body[name]) for name in ("messages", "system", "prompt") if body.get(name)}
    if "messages" in body:
        body["messages"].append({"role": "user", "content": "And now?"})


def _shorter(value: Any) -> Any:
    match value:
        case str():
            return value[:5]
        case list():
            return [_shorter(each) for each in value[:1]]
        case dict():
            return {name: each if name in _FIXED else _shorter(each) for name, each in value.items()}
    return value


def _prompt(prompt: Any) -> Any:
    if isinstance(prompt, list):
        return [_prompt(each) if not isinstance(each, int) else each % VOCAB_SIZE for each in prompt]
    return prompt


#: Texts of blocks that say what they are.
_FIXED = ("type", "role", "name")
_FITTING: Mapping[str, Callable[[Any, Random], Any]] = {
    "model": lambda _, random: NAME,
    "max_tokens": lambda _, random: random.choice((1, 2, 14, 30)),
    "max_completion_tokens": lambda _, random: random.choice((1, 2, 14, 30)),
    "max_output_tokens": lambda _, random: random.choice((1, 2, 14, 30)),
    "min_tokens": lambda _, random: random.choice((0, 1)),
    "n": lambda value, random: min(value, random.choice((1, 2, 8))),
    "tokens": lambda value, _: [each % VOCAB_SIZE for each in value],
    "stop_token_ids": lambda value, _: [each % VOCAB_SIZE for each in value],
    "allowed_token_ids": lambda value, _: [each % VOCAB_SIZE for each in value],
    "logprob_token_ids": lambda value, _: [each % VOCAB_SIZE for each in value],
    "messages": lambda value, _: value[:_LONGEST_LIST],
    "dimensions": lambda _, random: random.choice((1, 2, 16)),
}
