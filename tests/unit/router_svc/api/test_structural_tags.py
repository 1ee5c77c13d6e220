"""Structural tags: free text to a trigger, then the tag with its structure, then free text again; or a refusal."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from pdserve.base.errors import RequestError
from pdserve.v1 import inference_pb2 as pb
from router_svc.api.grpc_structure import structured_fields
from router_svc.api.openai.schema import CompletionBody
from router_svc.api.parse import parse_body
from router_svc.api.structured import StructuredFields, grammar_of
from tests.support.json_schemas.oracle import Oracle
from tests.support.json_schemas.texts import Texts

POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "s": {"type": "string"}},
    "required": ["x"],
    "additionalProperties": False,
}
LIST = {"type": "array", "items": {"type": "boolean"}}
OLDER = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<fn=a>", "schema": POINT, "end": "</fn>"},
        {"begin": "<fn=b>", "schema": LIST, "end": "</fn>"},
        {"begin": "[call]", "schema": POINT, "end": ""},
    ],
    "triggers": ["<fn", "[call]"],
}


def tag(begin: str, content: Any, end: str | list[str] = "</t>") -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def schema(value: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": value}


def const(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def triggered(**more: Any) -> dict[str, Any]:
    tags = [tag("<t>", schema(LIST)), tag("<text>", {"type": "any_text"}, "</text>")]
    return {"type": "triggered_tags", "triggers": ["<t"], "tags": tags, **more}


NEWER = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["<fn", "[call]"],
        "tags": [tag(each["begin"], schema(each["schema"]), each["end"]) for each in OLDER["structures"]],  # type: ignore[index]
    },
}


@pytest.fixture(scope="module")
def texts() -> Texts:
    return Texts()


def fields(**given: Any) -> StructuredFields:
    return parse_body(CompletionBody, json.dumps({"model": "m", "prompt": "x", **given}).encode())


def of_format(content: Any) -> str:
    return grammar_of(fields(response_format={"type": "structural_tag", "format": content}))


def matches(text: str) -> bool:
    """Whether every trigger of `OLDER` in the text starts a tag, found without a grammar."""
    rest = text
    while True:
        found = [index for index in (rest.find(trigger) for trigger in ("<fn", "[call]")) if index >= 0]
        if not found:
            return True
        rest = rest[min(found) :]
        for begin, wanted, end in (("<fn=a>", POINT, "</fn>"), ("<fn=b>", LIST, "</fn>"), ("[call]", POINT, "")):
            if rest.startswith(begin):
                try:
                    _, length = json.JSONDecoder().raw_decode(rest[len(begin) :])
                except ValueError:
                    return False
                behind = len(begin) + length
                if not Oracle(wanted).accepts(rest[len(begin) : behind]) or not rest.startswith(end, behind):
                    return False
                rest = rest[behind + len(end) :]
                break
        else:
            return False


def test_texts_are_accepted_that_have_a_tag_at_every_trigger(texts: Texts) -> None:
    grammar = texts.vocabulary.compile(grammar_of(fields(response_format=OLDER)))
    rng = random.Random(0)
    pieces = ["<fn", "=a>", "<fn=a>", "<fn=b>", "</fn>", "[call]", "<", "[", "é \n", "{}", "[true]", '{"x": 1}']
    pieces += [
        '<fn=a>{"x": 2}</fn>',
        "<fn=b>[]</fn>",
        '[call]{"x": 3}',
        '{"x": 1, "s": "<fn=c>[call]"}',
        "[call",
        "=c>",
    ]
    accepted = 0
    for _ in range(1500):
        text = "".join(rng.choices(pieces, k=rng.randrange(7)))
        assert texts.accepts(grammar, text) == matches(text), text
        accepted += matches(text)
    assert 300 < accepted < 1200


def test_walks_have_a_tag_at_every_trigger(texts: Texts) -> None:
    grammar = texts.vocabulary.compile(grammar_of(fields(response_format=NEWER)))
    walks = [texts.walk(grammar, random.Random(seed)) for seed in range(20)]
    assert all(text is None or matches(text) for text in walks)
    assert any(walks)


def test_all_fields_and_both_forms_are_one_grammar_text() -> None:
    expected = grammar_of(fields(response_format=OLDER))
    for given in (OLDER, json.dumps(OLDER), NEWER, json.dumps(NEWER)):
        assert grammar_of(fields(structured_outputs={"structural_tag": given})) == expected
    assert grammar_of(fields(response_format=NEWER)) == expected
    over_grpc = pb.GenerateRequest(structured_output=pb.StructuredOutput(structural_tag=json.dumps(OLDER)))
    assert grammar_of(structured_fields(over_grpc)) == expected


@pytest.mark.parametrize(
    ("content", "good", "bad"),
    [
        (const('a"é\n'), ['a"é\n'], ["a", ""]),
        (schema(LIST), ["[]", "[true, false]", "[\n  true\n]"], ["[1]", " []", "[] "]),
        ({"type": "regex", "pattern": "a+/\\/b"}, ["a//b", "aa//b"], ["a/b", "//b"]),
        ({"type": "any_text"}, ["", "x\ny"], []),
        ({"type": "any_text", "excludes": ["bad", "é"]}, ["", "ba"], ["bad", "xbady", "é"]),
        ({"type": "sequence", "elements": [const("a"), schema(LIST), const("b")]}, ["a[]b"], ["a[]", "[]b", "ab"]),
        (
            {"type": "or", "elements": [const("[no]"), schema(LIST), schema({"const": ["x"]}), const("a")]},
            ["[no]", "[true]", '["x"]', "a"],
            ["", "[1]"],
        ),
        ({"type": "optional", "content": const("a")}, ["", "a"], ["aa"]),
        ({"type": "plus", "content": schema(LIST)}, ["[]", "[][]"], [""]),
        ({"type": "star", "content": tag("(", schema(LIST), ")")}, ["", "([])([])"], ["("]),
        ({"type": "repeat", "min": 1, "max": 2, "content": const("ab")}, ["ab", "abab"], ["", "ababab"]),
        ({"type": "repeat", "min": 1, "max": -1, "content": schema(LIST)}, ["[]", "[][][]"], [""]),
        (tag("<t>", {"type": "any_text"}, ["</t>", "</u>"]), ["<t></t>", "<t>a</x></u>"], ["<t>", "<t></t>a"]),
        (tag("<t>", {"type": "any_text", "excludes": ["x"]}), ["<t>a</t>"], ["<t>x</t>"]),
        (tag("<t>", {"type": "regex", "pattern": ".*"}), ["<t></t>", "<t>a</t>"], ["<t>\n</t>", "<t>"]),
        (triggered(), ["", "a<", "a<t>[]</t>b<text>c</text>", "<t>[true]</t><t>[]</t>"], ["<t", "<t>[]", "<t>1</t>"]),
        (triggered(at_least_one=True), ["<t>[]</t>", "<t>[]</t>a<t>[]</t>b"], ["", "a", "a<t>[]</t>"]),
        (triggered(stop_after_first=True), ["", "a", "a<t>[]</t>"], ["a<t>[]</t>b", "<t"]),
        (triggered(at_least_one=True, stop_after_first=True), ["<t>[]</t>"], ["", "a<t>[]</t>", "<t>[]</t>a"]),
        (
            {"type": "sequence", "elements": [tag("<think>", {"type": "any_text"}, "</think>"), triggered()]},
            ["<think>a</think>", "<think></think>b<t>[]</t>"],
            ["", "b<t>[]</t>", "<think>a"],
        ),
        (
            {"type": "tags_with_separator", "tags": [tag("(", schema(LIST), ")")], "separator": ", "},
            ["", "([])", "([]), ([])"],
            ["([])([])", "([]), "],
        ),
        (
            {"type": "tags_with_separator", "tags": [tag("(", const("a"), ")")], "separator": "", "at_least_one": True},
            ["(a)", "(a)(a)"],
            [""],
        ),
    ],
)
def test_each_format_allows_what_it_says(texts: Texts, content: Any, good: list[str], bad: list[str]) -> None:
    grammar = texts.vocabulary.compile(of_format(content))
    for text in good:
        assert texts.accepts(grammar, text), text
    for text in bad:
        assert not texts.accepts(grammar, text), text


def test_json_in_a_tag_is_spaced_and_closed_as_the_options_say(texts: Texts) -> None:
    open_tag = {"type": "structural_tag", "format": tag("<t>", schema({"properties": {"a": {}}, "type": "object"}))}
    options = {"disable_any_whitespace": True, "disable_additional_properties": True}
    grammar = texts.vocabulary.compile(grammar_of(fields(structured_outputs={"structural_tag": open_tag, **options})))
    assert texts.accepts(grammar, '<t>{"a":1}</t>')
    assert not texts.accepts(grammar, '<t>{"a": 1}</t>')
    assert not texts.accepts(grammar, '<t>{"b":1}</t>')


@pytest.mark.parametrize(
    ("content", "where"),
    [
        (tag("<t>", schema({"type": "array", "uniqueItems": True})), "content.json_schema.uniqueItems"),
        (triggered(triggers=["<t", "<tex"]), "tags.1.begin"),
        (triggered(triggers=["<x"]), "tags.0.begin"),
        (triggered(triggers=["<t", "<u"]), "triggers"),
        (tag("<t>", {"type": "any_text"}, ""), "end"),
        (tag("<t>", triggered()), "content"),
        ({"type": "sequence", "elements": [{"type": "any_text"}, const("a")]}, "elements.0"),
        ({"type": "star", "content": triggered()}, "content"),
        ({"type": "or", "elements": [const("a"), triggered()]}, "elements.1"),
    ],
)
def test_what_cannot_be_expressed_is_refused_with_its_path(content: Any, where: str) -> None:
    with pytest.raises(RequestError) as refused:
        of_format(content)
    assert refused.value.param == f"response_format.format.{where}"
    assert f"response_format.format.{where}" in str(refused.value)


def test_the_older_form_is_refused_with_its_own_paths() -> None:
    structures = [{"begin": "<fn>", "schema": {"not": {}}, "end": ""}]
    given = {"type": "structural_tag", "structures": structures, "triggers": ["<fn"]}
    with pytest.raises(RequestError) as refused:
        grammar_of(fields(structured_outputs={"structural_tag": json.dumps(given)}))
    assert refused.value.param == "structured_outputs.structural_tag.structures.0.schema.not"
    with pytest.raises(RequestError) as refused:
        grammar_of(fields(response_format=given | {"triggers": ["<g"]}))
    assert refused.value.param == "response_format.structures.0.begin"


@pytest.mark.parametrize(
    "content",
    [
        {"type": "grammar", "grammar": 'root ::= "a"'},
        {"type": "qwen_xml_parameter", "json_schema": {}},
        {"type": "dispatch", "rules": []},
        {"type": "token", "token": 3},
        {"type": "any_text", "max_tokens": 3},
        schema({}) | {"style": "qwen_xml"},
        schema({}) | {"any_order": True},
        triggered(excludes=["a"]),
        {"type": "or", "elements": []},
        {"type": "repeat", "min": 0, "max": 100_000, "content": const("a")},
        {"type": "const_string", "value": ""},
    ],
)
def test_a_format_that_is_not_known_is_refused_by_name(content: Any) -> None:
    given = {"type": "structural_tag", "format": {"type": "sequence", "elements": [const("a"), content]}}
    with pytest.raises(RequestError) as refused:
        fields(response_format=given)
    assert refused.value.param is not None
    assert refused.value.param.startswith("response_format.format.sequence.elements[1]")
    with pytest.raises(RequestError) as refused:
        grammar_of(fields(structured_outputs={"structural_tag": json.dumps(given)}))
    assert refused.value.param is not None
    assert "elements.1" in refused.value.param


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"format": const("a"), "triggers": ["a"]},
        {"structures": OLDER["structures"]},
        {"triggers": ["<fn"]},
        {"structures": [], "triggers": ["<fn"]},
        {"structures": OLDER["structures"], "triggers": [""]},
    ],
)
def test_a_tag_of_neither_form_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        fields(response_format={"type": "structural_tag", **given})
    with pytest.raises(RequestError):
        grammar_of(fields(structured_outputs={"structural_tag": "{"}))


def test_formats_are_bounded() -> None:
    deep: Any = const("a")
    for _ in range(20):
        deep = {"type": "optional", "content": deep}
    with pytest.raises(RequestError, match="levels deep"):
        of_format(deep)
    wide = {"type": "or", "elements": [{"type": "or", "elements": [const("a")] * 100}] * 100}
    with pytest.raises(RequestError, match="more than 1000 formats"):
        of_format(wide)
    with pytest.raises(RequestError, match="at most 262144 characters"):
        fields(structured_outputs={"structural_tag": " " * 300_000})
