"""Structured output: the fields in which clients ask for it, named as by OpenAI and vLLM, and the grammar they mean."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import MaxLen, MinLen
from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark
from pydantic import Field, GetJsonSchemaHandler, StringConstraints
from pydantic_core import CoreSchema

from pdserve.base.errors import RequestError, TooLarge
from pdserve.base.sampling import MAX_GRAMMAR
from pdserve.model.grammar_check import grammar_problem
from router_svc.api.body import Body, StrictModel
from router_svc.api.body_schema import Schema, one_of, with_conditions
from router_svc.api.gbnf import is_gbnf, respelled
from router_svc.api.json_grammars import Whitespace, json_grammar
from router_svc.api.lenient import by_field, tagged
from router_svc.api.structural_tags import StructuralTag
from router_svc.api.tag_grammars import tag_grammar
from router_svc.api.terminal_size import MAX_TERMINAL, has_large_terminal

MAX_CHOICES = 1024
MAX_CHOICE_CHARACTERS = 4096
MAX_PATTERN_CHARACTERS = 16_384
#: Rules and brackets of a grammar in text: llguidance's stack grows with them, and overflows at several times as many.
MAX_RULES = 1000
_Pattern = Annotated[str, MinLen(1), MaxLen(MAX_PATTERN_CHARACTERS)]
_GrammarText = Annotated[str, MinLen(1), MaxLen(MAX_GRAMMAR)]
_Choices = Annotated[list[Annotated[str, MinLen(1), MaxLen(MAX_CHOICE_CHARACTERS)]], MinLen(1), MaxLen(MAX_CHOICES)]


class TextFormat(StrictModel):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(StrictModel):
    """Any JSON object."""

    type: Literal["json_object"]


class NamedSchema(StrictModel):
    """A JSON schema, and what OpenAI wants to know about it besides."""

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: str | None = None
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]
    #: Every schema is enforced.
    strict: bool | None = None


class JsonSchemaFormat(StrictModel):
    """JSON that a schema accepts."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[
    Annotated[TextFormat, tagged("text")]
    | Annotated[JsonObjectFormat, tagged("json_object")]
    | Annotated[JsonSchemaFormat, tagged("json_schema")]
    | Annotated[StructuralTag, tagged("structural_tag")],
    by_field("type", "must have the type text, json_object, json_schema or structural_tag"),
]


class StructuredOutputs(StrictModel):
    """vLLM's field. Exactly one of the first six is given."""

    json_schema: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    regex: _Pattern | None = None
    choice: _Choices | None = None
    grammar: _GrammarText | None = None
    json_object: Literal[True] | None = None
    structural_tag: dict[str, Any] | _GrammarText | None = None
    whitespace_pattern: _Pattern | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> Schema:
        schema = handler.resolve_ref_schema(handler(core))
        return with_conditions(schema, (one_of(*_KINDS),))


class StructuredFields(Body):
    """The fields of a body that say what its output has to match. At most one of them does."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: _Pattern | None = None
    guided_choice: _Choices | None = None
    guided_grammar: _GrammarText | None = None
    guided_whitespace_pattern: _Pattern | None = None


_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_Kind = Literal["json", "regex", "choice", "grammar", "structural_tag"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Demand:
    """One thing that the output has to match."""

    #: The field, for errors.
    param: str
    kind: _Kind
    value: Any
    whitespace: Whitespace = field(default_factory=Whitespace)
    closes_objects: bool = False


def has_structure(fields: StructuredFields) -> bool:
    """Whether any of the fields is given."""
    return any(getattr(fields, name) is not None for name in StructuredFields.model_fields)


def grammar_of(fields: StructuredFields) -> str:
    """The grammar that the fields mean; empty: any text. It may take some milliseconds to check.

    Raises:
        RequestError: with the field, when there are two grammars, or one that is not valid or cannot be enforced.
    """
    demands = list(_demands(fields))
    if len(demands) > 1:
        raise RequestError(
            f"`{demands[0].param}` and `{demands[1].param}` both say what the output has to match. Send one of them.",
            param=demands[1].param,
        )
    if not demands:
        return ""
    return _grammar_of(demands[0])


def _demands(fields: StructuredFields) -> Iterator[_Demand]:
    match fields.response_format:
        case JsonObjectFormat():
            yield _Demand(param="response_format", kind="json", value={"type": "object"})
        case JsonSchemaFormat(json_schema=named):
            yield _Demand(param="response_format.json_schema.schema", kind="json", value=named.json_schema)
        case StructuralTag():
            yield _Demand(param="response_format", kind="structural_tag", value=fields.response_format)
        case _:
            pass
    if fields.structured_outputs is not None:
        yield _of_structured_outputs(fields.structured_outputs)
    spacing = Whitespace(pattern=fields.guided_whitespace_pattern)
    if fields.guided_json is not None:
        yield _Demand(param="guided_json", kind="json", value=fields.guided_json, whitespace=spacing)
    if fields.guided_regex is not None:
        yield _Demand(param="guided_regex", kind="regex", value=fields.guided_regex)
    if fields.guided_choice is not None:
        yield _Demand(param="guided_choice", kind="choice", value=fields.guided_choice)
    if fields.guided_grammar is not None:
        yield _Demand(param="guided_grammar", kind="grammar", value=fields.guided_grammar)


def _of_structured_outputs(given: StructuredOutputs) -> _Demand:
    kinds: dict[str, tuple[_Kind, object]] = {
        "json": ("json", given.json_schema),
        "regex": ("regex", given.regex),
        "choice": ("choice", given.choice),
        "grammar": ("grammar", given.grammar),
        "json_object": ("json", None if given.json_object is None else {"type": "object"}),
        "structural_tag": ("structural_tag", given.structural_tag),
    }
    found = [(name, kind, value) for name, (kind, value) in kinds.items() if value is not None]
    if len(found) != 1:
        raise RequestError(
            f"`structured_outputs` has {len(found)} of {', '.join(kinds)}. Send exactly one of them.",
            param="structured_outputs",
        )
    [(name, kind, value)] = found
    return _Demand(
        param=f"structured_outputs.{name}",
        kind=kind,
        value=value,
        whitespace=Whitespace(pattern=given.whitespace_pattern, is_disabled=bool(given.disable_any_whitespace)),
        closes_objects=bool(given.disable_additional_properties),
    )


def _grammar_of(demand: _Demand) -> str:
    match demand.kind:
        case "json":
            return json_grammar(
                demand.value, demand.whitespace, closes_objects=demand.closes_objects, param=demand.param
            )
        case "structural_tag":
            return tag_grammar(
                demand.value, demand.whitespace, closes_objects=demand.closes_objects, param=demand.param
            )
        case "regex":
            grammar = LLMatcher.grammar_from_regex(demand.value)
        case "choice":
            options = " | ".join(json.dumps(each) for each in demand.value)
            grammar = LLMatcher.grammar_from_lark(f"start: {options}")
        case _:
            text = demand.value
            # Before it is converted, which takes a time that grows with the square of the number of rules.
            if sum(map(text.replace("::=", ":").count, ":([{")) > MAX_RULES:
                raise TooLarge(
                    f"`{demand.param}` has more than {MAX_RULES} rules and brackets together. Simplify it.",
                    param=demand.param,
                )
            if "%json" in text:
                raise RequestError(f"`{demand.param}` may not have `%json`. Use a structural tag.", param=demand.param)
            try:
                text = gbnf_to_lark(respelled(text)) if is_gbnf(text) else text
            except Exception as error:  # Its converter documents none; the client's text is the cause of all of them.
                raise RequestError(f"`{demand.param}` is not valid: {error}.", param=demand.param) from error
            if has_large_terminal(text):
                raise TooLarge(
                    f"`{demand.param}` has a terminal of more than {MAX_TERMINAL} characters, or one that is part of "
                    "itself, once all names in it are replaced. Simplify it.",
                    param=demand.param,
                )
            grammar = LLMatcher.grammar_from_lark(text)
    if problem := grammar_problem(grammar):
        raise RequestError(f"`{demand.param}` is not valid: {problem}.", param=demand.param)
    return grammar
