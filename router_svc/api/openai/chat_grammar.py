"""The grammar of a chat's answer: calls with arguments of their schemas, thinking, and structured output, in one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pdserve.base.errors import RequestError, TooLarge
from pdserve.base.sampling import MAX_GRAMMAR
from pdserve.model.grammar_check import grammar_problem
from router_svc.api.json_grammars import Whitespace, json_grammar, unchecked_json_grammar, without_annotations
from router_svc.api.json_keywords import reachable
from router_svc.api.openai.tools import Function, ToolUse, TypeFinder
from router_svc.messages.formats import MessageFormat
from router_svc.messages.grammar import CallableTool, Calls, MessageRules, Thinking, message_grammar
from router_svc.messages.parameter_grammar import Parameter

Grammars = Sequence[Mapping[str, Any]]
_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
_WITHOUT_PROPERTIES: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
#: Keywords that say nothing about a text.
_HARMLESS = frozenset({"type", "title", "description", "default", "examples", "enum", "const", "$comment"})


def chat_grammar(
    form: MessageFormat, use: ToolUse, thinking: Thinking, text: str, special_tokens: Mapping[str, int]
) -> str:
    """The grammar's text; empty: any answer. `text`: the grammar of the text for the client, if it has one.

    Raises `RequestError` for tools that cannot be enforced although they are `strict`, or are too large.
    """
    if not use.tools and not text:
        return ""
    if form.calls is None and use.calls is Calls.REQUIRED:
        raise RequestError(
            "The messages of this model are read by its response_template, which does not say how calls are written. "
            "Leave `tool_choice` at auto, or start the router with --message-format.",
            param="tool_choice",
        )
    if form.calls is None:
        if not text:
            return ""
        use = ToolUse()  # The text is held to its grammar, in which there are no calls.
    rules = MessageRules(
        calls=use.calls,
        is_parallel=use.is_parallel,
        thinking=thinking,
        text=() if not text or use.calls is Calls.REQUIRED else _grammars(text),
    )
    problem = ""
    # All schemas are read together. Where one cannot be enforced, each is read by itself.
    for checks_each in (False, True):
        callables = _Callables(form, checks_each=checks_each)
        tools = [callables.make(use.tools[index], f"tools[{index}].function.parameters") for index in use.callable]
        grammar = message_grammar(form, replace(rules, tools=tools), special_tokens)
        _require_size(len(grammar))
        problem = grammar_problem(grammar)
        if not problem:
            return grammar
    raise RequestError(f"`tools` cannot be enforced together: {problem}. Send fewer.", param="tools")


def _require_size(characters: int) -> None:
    if characters > MAX_GRAMMAR:
        raise TooLarge(f"`tools` make a grammar of more than {MAX_GRAMMAR} characters. Send less.", param="tools")


def _grammars(text: str) -> Grammars:
    """The grammars of a text, which is in the library's form or one grammar."""
    if text.startswith("{"):
        found: Grammars = json.loads(text)["grammars"]
        return found
    return [{"lark_grammar": text}]


class _Callables:
    """Makes what the grammar has of each tool, until it is too large."""

    def __init__(self, form: MessageFormat, *, checks_each: bool) -> None:
        self._form = form
        self._checks_each = checks_each
        self._types = TypeFinder()
        self._size = 0

    def make(self, function: Function, where: str) -> CallableTool:
        """A tool whose schema is at `where` in the request. Raises `RequestError`."""
        schema = function.parameters if function.parameters is not None else _WITHOUT_PROPERTIES
        if schema.get("type", "object") != "object":
            raise RequestError(f"`{where}` must be the schema of an object.", param=where)
        schema = {"type": "object", **without_annotations(schema)}
        assert self._form.calls is not None
        if self._form.calls.parameter is None:
            arguments = self._enforced(schema, _ANY_OBJECT, bool(function.strict), where)
            return CallableTool(name=function.name, arguments=arguments)
        properties = schema.get("properties")
        named = properties if isinstance(properties, dict) else {}
        return CallableTool(
            name=function.name,
            parameters=[
                self._parameter(name, each if isinstance(each, dict) else {}, schema, bool(function.strict), where)
                for name, each in named.items()
            ],
        )

    def _parameter(
        self, name: str, own: Mapping[str, Any], schema: Mapping[str, Any], is_strict: bool, where: str
    ) -> Parameter:
        """An argument that is written by itself."""
        path = f"{where}.properties.{name}"
        if any(character in name for character in ">\n"):
            raise RequestError(f"`{path}` has a name that this model's form of calls cannot have.", param=path)
        required = schema.get("required")
        is_required = isinstance(required, list) and name in required
        if options := _options(own):
            return Parameter(name=name, is_required=is_required, options=options)
        if types := self._types.of(own, schema) - {"string"}:
            shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema and _has_references(own)}
            grammars = self._enforced({**shared, **own}, {"type": sorted(types)}, is_strict, path)
            return Parameter(name=name, is_required=is_required, grammars=grammars)
        if is_strict and not own.keys() <= _HARMLESS:
            raise RequestError(
                f"`{path}` cannot be enforced in this model's form of calls. Leave `strict` out.", param=path
            )
        return Parameter(name=name, is_required=is_required)

    def _enforced(
        self, schema: Mapping[str, Any], fallback: Mapping[str, Any], is_strict: bool, where: str
    ) -> Grammars:
        """The grammar of a schema. Where it cannot be enforced and need not be, that of `fallback`."""
        make = json_grammar if self._checks_each else unchecked_json_grammar
        try:
            text = make(schema, Whitespace(), closes_objects=is_strict, param=where)
        except RequestError:
            if is_strict:
                raise
            text = json_grammar(fallback, Whitespace(), closes_objects=False, param=where)
        self._size += len(text)
        _require_size(self._size)
        return _grammars(text)


def _has_references(schema: Mapping[str, Any]) -> bool:
    return any("$ref" in each for _, each in reachable(schema))


def _options(schema: Mapping[str, Any]) -> list[str]:
    """The texts that a parameter may have, if it is one of some."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list) or not all(isinstance(value, str) and value for value in values):
        return []
    return values
