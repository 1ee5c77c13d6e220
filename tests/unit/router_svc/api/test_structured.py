"""The fields of structured output become one grammar, or an error that names what cannot be enforced."""

from __future__ import annotations

import json
from array import array
from typing import Any

import numpy as np
import pytest

from pdserve.base.errors import RequestError
from pdserve.model.grammar import GrammarFailed, GrammarVocabulary
from pdserve.model.tokenizer import Tokenizer
from router_svc.api.json_limits import not_enforced
from router_svc.api.openai.schema import ChatBody, CompletionBody
from router_svc.api.parse import parse_body
from router_svc.api.structured import StructuredFields, grammar_of, has_structure
from router_svc.api.terminal_size import has_large_terminal
from tests.unit.model.vocabularies import byte_level

_TOKENIZER = byte_level()
_END = _TOKENIZER.token_to_id("<|end|>")
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
#: Characters beyond ASCII with which the library panics.
PANIC = "start: W\n" + r"""W: "XcZ" (/[\-\\a-cé-ü]/ | /['a-z]/ | (/[.é-üa-c]/ | /[éX-Z]/))"""


@pytest.fixture(scope="module")
def vocabulary() -> GrammarVocabulary:
    return GrammarVocabulary(Tokenizer(_TOKENIZER, (_END,)), _TOKENIZER.get_vocab_size())


def fields(**given: Any) -> StructuredFields:
    body = {"model": "m", "prompt": "x", **given}
    return parse_body(CompletionBody, json.dumps(body).encode())


def of_schema(schema: Any, **others: Any) -> StructuredFields:
    named = {"name": "answer", "schema": schema}
    return fields(response_format={"type": "json_schema", "json_schema": named}, **others)


def accepts(vocabulary: GrammarVocabulary, grammar: str, text: str) -> bool:
    """Whether a text is an output that the grammar allows, token by token and to its end."""
    state, output = vocabulary.compile(grammar).start(), array("q")
    try:
        for token in [*Tokenizer(_TOKENIZER, (_END,)).encode(text, False), _END]:
            bits = np.unpackbits(state.allowed(output, 0).view(np.uint8), bitorder="little")
            if not bits[token]:
                return False
            output.append(token)
    except GrammarFailed:
        return False
    return True


@pytest.mark.parametrize(
    ("given", "good", "bad"),
    [
        ({"response_format": {"type": "json_object"}}, ['{"a": [1, null]}', "{}"], ["[]", "1", '{"a": 1', "{} "]),
        ({"structured_outputs": {"json_object": True}}, ['{"a": 1}'], ["[]"]),
        ({"structured_outputs": {"json": PERSON}}, ['{"name": "Li", "age": 3}'], ['{"age": 3, "name": "Li"}', "{}"]),
        ({"structured_outputs": {"json": json.dumps(PERSON)}}, ['{"name":"Li","age":3}'], ['{"name":"Li"}']),
        ({"guided_json": PERSON}, ['{"name": "Li", "age": 3}'], ['{"name": "Li", "age": 3.5}']),
        ({"structured_outputs": {"regex": "a+/b"}}, ["aa/b"], ["a/", "xa/b"]),
        ({"guided_regex": r"\d{2}"}, ["42"], ["4", "421"]),
        ({"structured_outputs": {"choice": ['ja "doch"', "né\n"]}}, ['ja "doch"', "né\n"], ["ja", "né"]),
        ({"guided_choice": ["he", "hello"]}, ["he", "hello"], ["hell", ""]),
        ({"guided_grammar": 'root ::= "he" ("llo")*'}, ["he", "hellollo"], ["h"]),
        ({"structured_outputs": {"grammar": 'start: "a" b\nb: "b"+'}}, ["abb"], ["a"]),
    ],
)
def test_each_form_allows_what_it_says(
    vocabulary: GrammarVocabulary, given: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    requested = fields(**given)
    assert has_structure(requested)
    grammar = grammar_of(requested)
    for text in good:
        assert accepts(vocabulary, grammar, text), text
    for text in bad:
        assert not accepts(vocabulary, grammar, text), text


def test_a_schema_is_the_same_grammar_in_every_field() -> None:
    """So workers read it once, and a request that is repeated in another form has the same output."""
    expected = grammar_of(of_schema(PERSON))
    for given in (
        {"structured_outputs": {"json": PERSON}},
        {"guided_json": PERSON},
        {"guided_json": json.dumps(PERSON)},
    ):
        assert grammar_of(fields(**given)) == expected


@pytest.mark.parametrize("given", [{}, {"response_format": {"type": "text"}}, {"response_format": None}])
def test_without_a_demand_there_is_no_grammar(given: dict[str, Any]) -> None:
    assert grammar_of(fields(**given)) == ""


def test_white_space_is_bounded_unless_the_client_sets_a_pattern(vocabulary: GrammarVocabulary) -> None:
    """vllm#38696, sglang#8250: models write white space until their tokens are spent."""
    bounded = grammar_of(of_schema(PERSON))
    for text in ('{"name": "Li", "age": 3}', '{\n  "name": "Li",\n  "age": 3\n}', '{"name":"Li","age":3}'):
        assert accepts(vocabulary, bounded, text), text
    for text in ('{  "name": "Li", "age": 3}', '{\n\n"name": "Li", "age": 3}', '\n{"name": "Li", "age": 3}'):
        assert not accepts(vocabulary, bounded, text), text
    none = grammar_of(fields(structured_outputs={"json": PERSON, "disable_any_whitespace": True}))
    assert accepts(vocabulary, none, '{"name":"Li","age":3}')
    assert not accepts(vocabulary, none, '{"name": "Li","age":3}')
    own = grammar_of(fields(structured_outputs={"json": PERSON, "whitespace_pattern": r"[ ]{3}"}))
    assert accepts(vocabulary, own, '{   "name":"Li","age":3}')
    assert not accepts(vocabulary, own, '{ "name":"Li","age":3}')


def test_objects_can_be_closed(vocabulary: GrammarVocabulary) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "object", "properties": {"b": {"type": "integer"}}}}}
    text = '{"a": {"b": 1, "c": 2}}'
    assert accepts(vocabulary, grammar_of(fields(structured_outputs={"json": schema})), text)
    closed = grammar_of(fields(structured_outputs={"json": schema, "disable_additional_properties": True}))
    assert not accepts(vocabulary, closed, text)
    assert accepts(vocabulary, closed, '{"a": {"b": 1}}')


def nested(schema: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"list": {"type": "array", "items": {"anyOf": [{"type": "null"}, schema]}}},
        "$defs": {"unused": {"type": "string"}},
    }


WHERE = "response_format.json_schema.schema.properties.list.items.anyOf.1"


@pytest.mark.parametrize(
    ("schema", "keyword", "reason"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems", "uniqueItems"),
        ({"not": {"type": "string"}}, "not", "not"),
        ({"if": {"type": "string"}, "then": {"maxLength": 3}}, "if", "if"),
        ({"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}, "oneOf", "oneOf"),
        ({"type": "string", "format": "credit-card"}, "format", "credit-card"),
        ({"$ref": "https://example.com/schema.json"}, "$ref", "does not start with `#/`"),
        ({"type": "strin"}, "type", "strin"),
        ({"type": "array", "contains": {"type": "string"}}, "contains", "contains"),
        ({"type": "string", "pattern": "(a"}, "pattern", "unclosed group"),
        ({"type": "string", "pattern": "(?=a)b"}, "pattern", "look-around"),
        ({"type": "string", "pattern": r"(a)\1"}, "pattern", "backreferences"),
        ({"dependentRequired": {"a": ["b"]}}, "dependentRequired", "dependentRequired"),
        ({"propertyNames": {"pattern": "a"}}, "propertyNames", "propertyNames"),
        ({"type": "object", "unevaluatedProperties": False}, "unevaluatedProperties", "unevaluatedProperties"),
        ({"$dynamicRef": "#a"}, "$dynamicRef", "dynamicRef"),
        ({"type": "string", "minLength": "x"}, "minLength", "minLength"),
        ({"const": 2**53 + 1}, "const", "9007199254740993 is beyond"),
        ({"enum": ["a", {"b": ["\x00"]}]}, "enum", "control character"),
        ({"enum": ["\x7f"]}, "enum", "U\\+007F"),
        ({"type": "integer", "maximum": 2**60 + 127}, "maximum", "not exact"),
        ({"type": "integer", "exclusiveMaximum": 2**60}, "exclusiveMaximum", "not exact"),
        ({"type": "integer", "minimum": -(2**53) - 1}, "minimum", "not exact"),
        ({"type": "object", "minProperties": 3, "required": ["a"]}, "minProperties", "2 more than `required` names"),
        ({"multipleOf": 10_001}, "multipleOf", "common multiple"),
        (
            {"allOf": [{"multipleOf": 97}, {"multipleOf": 0.89}, {"multipleOf": 5}]},
            "allOf.2.multipleOf",
            "common multiple",
        ),
        ({"patternProperties": {"[[a]]": {}}}, "patternProperties", "operation on sets"),
        ({"pattern": "[a--b]"}, "pattern", "operation on sets"),
        ({"pattern": r"\Aa"}, "pattern", "different meanings"),
        ({"pattern": "(?x)a b"}, "pattern", "different meanings"),
        ({"pattern": "[]a]"}, "pattern", "different meanings"),
        ({"pattern": "a++"}, "pattern", "repeats"),
    ],
)
def test_what_cannot_be_enforced_is_refused_with_its_path(schema: dict[str, Any], keyword: str, reason: str) -> None:
    """Peers drop such keywords without a word (xgrammar#858, #967, vllm#56556)."""
    with pytest.raises(RequestError, match=reason) as refused:
        grammar_of(of_schema(nested(schema)))
    assert refused.value.param == f"{WHERE}.{keyword}"
    assert f"{WHERE}.{keyword}" in str(refused.value)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}},
        {"$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}, "$ref": "#/$defs/n"},
        {"type": "string", "pattern": "^[a-z]{2,5}$", "maxLength": 4},
        {"type": "string", "format": "date-time"},
        {"type": "number", "minimum": 0, "exclusiveMaximum": 10, "multipleOf": 0.5},
        {"type": "array", "prefixItems": [{"const": 1}], "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
        {"enum": ["a", 1, None, {"b": []}]},
        {"allOf": [{"type": "object", "required": ["a"]}, {"properties": {"a": {"type": "integer"}}}]},
        {"type": ["string", "null"], "title": "T", "description": "D", "default": None, "examples": ["x"]},
        {"type": "object", "patternProperties": {"^x-": {"type": "integer"}}, "additionalProperties": False},
        {"$defs": {"größe": {"type": "integer"}, "a/~b": {"$ref": "#/$defs/größe"}}, "$ref": "#/$defs/a~1~0b"},
        {"type": "array", "uniqueItems": False},
        {"type": "integer", "minimum": 0, "maximum": 2**63 - 1},
        {"type": "integer", "maximum": 2**64 - 1},
        {"type": "object", "required": ["a", "b"], "minProperties": 3},
        {"type": "string", "pattern": r"^(?:[\w.-]+|\[\^\d\]|(?<name>\u0041))$"},
        {"type": "string", "pattern": "(?i)^a$"},
    ],
)
def test_what_is_in_use_is_enforced(vocabulary: GrammarVocabulary, schema: dict[str, Any]) -> None:
    vocabulary.compile(grammar_of(of_schema(schema)))


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        ({"guided_json": PERSON, "guided_choice": ["a"]}, "guided_choice"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "[1]"}, "guided_json"),
        ({"guided_json": {"x-guidance": {"lenient": True}}}, "guided_json"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_grammar": PANIC}, "guided_grammar"),
        # What `%json` has is read by the library alone, and with options of the client's.
        ({"guided_grammar": 'start: %json {"x-guidance": {"lenient": true}, "not": {}}'}, "guided_grammar"),
        ({"guided_grammar": "root ::= ("}, "guided_grammar"),
        ({"guided_grammar": "nothing at all"}, "guided_grammar"),
    ],
)
def test_a_demand_that_is_no_grammar_is_refused_with_its_field(given: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as refused:
        grammar_of(fields(**given))
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": [""]}, "guided_choice"),
        ({"guided_choice": ["a"] * 1025}, "guided_choice"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
        ({"structured_outputs": {"jsn": {}}}, "structured_outputs"),
    ],
)
def test_a_field_of_the_wrong_form_is_refused_by_name(given: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as refused:
        fields(**given)
    assert refused.value.param is not None
    assert refused.value.param.startswith(param)


def chain(count: int) -> dict[str, Any]:
    """Definitions, each of which refers to the next."""
    defs = {f"d{i}": {"properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(count)}
    return {"$defs": defs | {f"d{count}": {"type": "string"}}, "$ref": "#/$defs/d0"}


def doubled(start: str, is_defined_as: str) -> str:
    """A grammar of 300 terminals, each of which has the next one twice."""
    chained = "".join(f"T{i}{is_defined_as}T{i + 1} T{i + 1}\n" for i in range(300))
    return f'{start}{chained}T300{is_defined_as}"a"'


BOUNDED = {"type": "number", "minimum": -1.2345, "maximum": 123456.789}


@pytest.mark.parametrize(
    ("given", "needle"),
    [
        ({"guided_json": json.dumps(chain(2000))}, "levels"),
        ({"guided_json": json.dumps({"$defs": {"a": {"$id": "b", **chain(9)}}})}, r"\$id"),
        ({"guided_json": '{"$ref": "#anchor"}'}, "does not start with"),
        ({"guided_grammar": "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(9000)) + 'r9000: "a"'}, "rules"),
        ({"guided_grammar": "root ::= " + "(" * 60_000}, "guided_grammar"),
        ({"guided_regex": "(" * 8000 + "a" + ")" * 8000}, "invalid regex"),
        ({"guided_grammar": "start: " + "(" * 100_000 + '"a"' + ")" * 100_000}, "rules and brackets"),
        ({"guided_grammar": "start: " + '"a"?' * 60_000}, "grammar size"),
        ({"guided_grammar": doubled("start: T0\n", ": ")}, "terminal of more than 1000000"),
        ({"guided_grammar": doubled("root ::= T0\n", " ::= ")}, "terminal of more than 1000000"),
        ({"guided_grammar": 'start: A\nA: "x" B\nB: A | "y"'}, "part of itself"),
        ({"guided_json": {"type": "array", "prefixItems": [BOUNDED] * 3000}}, "`guided_json` cannot be enforced"),
        ({"guided_json": '{"items":' * 20_000}, "not JSON"),
        ({"guided_json": " " * 300_000}, "300000 characters"),
        ({"guided_json": '{"minimum": NaN}'}, "not JSON"),
        ({"guided_json": '{"const": "\\ud800"}'}, "not JSON"),
    ],
)
def test_no_demand_ends_the_router(given: dict[str, Any], needle: str) -> None:
    """Chains of rules and references overflowed llguidance's stack, and with it ended the process.

    Terminals that double each other, and many bounds of numbers, took it seconds.
    """
    with pytest.raises(RequestError, match=needle) as refused:
        grammar_of(StructuredFields(**given))
    assert len(str(refused.value)) < 700


def test_terminals_of_terminals_are_allowed() -> None:
    """As grammars of programming languages have them, defined in either order."""
    names = "\n".join(f'T{i}: T{i + 1} "[TIME]" /[TIME]+/' for i in range(200)) + '\nT200: "a" | /b/'
    commented = 'start: A\nA: "x" B  // A is made of B, and "B of /y\nB: "y"  # as in A'
    for text in (f"start: T0\n{names}", "start: T0\n" + "\n".join(reversed(names.split("\n"))), commented):
        assert grammar_of(StructuredFields(guided_grammar=text))


@pytest.mark.parametrize("other", ["", r"\x00|", r"\u0000|", r"\p{Cc}|", "\x00|", r"[\x00a]|", r"\P{Lo}[^\P{Cc}]|"])
def test_a_class_without_quotes_has_none_whatever_else_the_pattern_has(
    vocabulary: GrammarVocabulary, other: str
) -> None:
    grammar = grammar_of(of_schema({"type": "string", "pattern": rf'^({other}[^"])*$'}))
    assert accepts(vocabulary, grammar, '"hello"')
    assert not accepts(vocabulary, grammar, r'"he\"llo"')


def test_an_unknown_property_cannot_be_a_known_one_in_disguise(vocabulary: GrammarVocabulary) -> None:
    """Parsers take the last of two equal names, so that a value of another type would count."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "patternProperties": {"^x": {"const": 1}}}
    grammar = grammar_of(of_schema(schema))
    assert accepts(vocabulary, grammar, '{"a": 1, "xy": 1, "b": "é"}')
    for text in (
        '{"a": 1, "\\u0061": "no number"}',
        '{"\\u0061": "no number"}',
        '{"\\u0078y": 2}',
        '{"a": 1, "a": "x"}',
    ):
        assert not accepts(vocabulary, grammar, text), text


def test_a_property_without_a_value_is_found_behind_those_that_need_it() -> None:
    empty = {"type": "object", "properties": {"a": {"enum": []}}, "required": ["a"]}
    with pytest.raises(RequestError, match="no value matches it") as refused:
        grammar_of(of_schema({"type": "object", "properties": {"b": empty}, "required": ["b"]}))
    assert refused.value.param == "response_format.json_schema.schema.properties.b.properties.a.enum"


@pytest.mark.parametrize(
    ("schema", "path", "problem"),
    [
        ({"properties": {"a": {"$ref": "#/properties/a"}}}, ".properties.a.$ref", "refers to itself"),
        ({"$ref": "#/$defs/x", "$defs": {"x": {"anyOf": [{"$ref": "#/$defs/x"}]}}}, ".$ref", "refers to itself"),
        ({"allOf": [{"$ref": "#"}]}, ".allOf", "refers to itself"),
        ({"enum": ["x", ["y" * 20_001]]}, ".enum", "20001 characters"),
        ({"type": "string", "format": "date", "pattern": "^2023-02-29$"}, "", "no value matches it"),
        ({"format": "date", "pattern": "^2", "allOf": 5}, ".allOf", "must be an array"),
        ({"exclusiveMinimum": 0, "minimum": "a", "maximum": 0.5}, ".minimum", "Expected"),
        ({"items": {"multipleOf": 0.25, "minimum": 0.5, "maximum": 0.5}}, ".items.multipleOf", "can be written"),
    ],
)
def test_what_could_not_be_followed_to_an_end_is_refused_at_once(schema: Any, path: str, problem: str) -> None:
    """Each was an output that ended in the middle, with an error."""
    with pytest.raises(RequestError, match=problem) as refused:
        grammar_of(of_schema(schema))
    assert refused.value.param == f"response_format.json_schema.schema{path}"


def test_chains_of_references_are_followed_within_a_second() -> None:
    """Fails by the test's timeout where each chain is followed again from each of its ends."""
    chains = {f"{chain}_{step}": {"$ref": f"#/$defs/{chain}_{step + 1}"} for chain in range(50) for step in range(190)}
    ends: dict[str, Any] = {f"{chain}_190": {"type": "null"} for chain in range(50)}
    schema = {"$defs": chains | ends, "anyOf": [{"$ref": f"#/$defs/{chain}_0"} for chain in range(50)]}
    assert not_enforced(schema) is None
    schema["$defs"]["7_190"] = {"$ref": "#/$defs/7_0"}
    assert not_enforced({"$ref": "#/$defs/7_3", **schema}) == (("$ref",), "it refers to itself without end")


def test_bounds_and_lists_of_items_may_be_those_of_earlier_drafts(vocabulary: GrammarVocabulary) -> None:
    excluded = grammar_of(of_schema({"type": "number", "minimum": 0, "exclusiveMinimum": True, "maximum": 0.5}))
    assert accepts(vocabulary, excluded, "0.25")
    assert not accepts(vocabulary, excluded, "0")
    pair = grammar_of(of_schema({"type": "array", "items": [{"type": "integer"}, {"type": "null"}]}))
    assert accepts(vocabulary, pair, "[1, null]")
    assert not accepts(vocabulary, pair, "[null, 1]")


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"type": "json_schema", "json_schema": {"schema": {}}}, "response_format.json_schema.name"),
        ({"type": "json_schema"}, "response_format.json_schema"),
        ({"type": "json_object", "strict": True}, "response_format.strict"),
        ({"type": "yaml"}, "response_format"),
    ],
)
def test_an_error_names_the_path_in_the_request(given: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as refused:
        fields(response_format=given)
    assert refused.value.param == param
    assert f"`{param}`" in str(refused.value)


def test_definitions_may_refer_to_each_other_and_to_themselves(vocabulary: GrammarVocabulary) -> None:
    names = [f"d{i}" for i in range(60)]
    each = {"anyOf": [{"$ref": f"#/$defs/{name}"} for name in names], "properties": {"a": {"$ref": "#"}}}
    to_null = {name: {"$ref": "#/$defs/d9"} for name in names[:8]}
    grammar_of(fields(guided_json={"$defs": to_null | {"d9": {"type": "null"}}}))
    with pytest.raises(RequestError):  # Every path through all of them is longer than the bound.
        grammar_of(
            StructuredFields(guided_json=json.dumps({"$defs": dict.fromkeys(names, each), "$ref": "#/$defs/d0"}))
        )
    tree = {"type": "object", "properties": {"left": {"$ref": "#"}, "right": {"$ref": "#/properties/left"}}}
    vocabulary.compile(grammar_of(of_schema(tree)))


def test_a_schema_of_too_many_levels_is_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(70):
        deep = {"items": deep}
    with pytest.raises(RequestError, match="levels"):
        grammar_of(StructuredFields(guided_json=json.dumps(deep)))


def test_chats_have_the_same_fields() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_object"}}
    assert grammar_of(parse_body(ChatBody, json.dumps(body).encode())) == grammar_of(
        fields(response_format={"type": "json_object"})
    )


@pytest.mark.parametrize("repeated", [" ", '"\\', "/\\", "A", "[ "])
def test_what_is_not_closed_is_read_once(repeated: str) -> None:
    """It takes hours to look for the end from each of its characters."""
    text = f"a{repeated * 120_000}"
    assert not has_large_terminal(f"start: A\n{text}\nA: {text}")
