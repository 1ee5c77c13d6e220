"""GBNF means what it means in llama.cpp, whatever llguidance's converter makes of its spelling."""

from __future__ import annotations

import json

import pytest

from pdserve.base.errors import RequestError
from router_svc.api.gbnf import is_gbnf, respelled
from router_svc.api.openai.schema import CompletionBody
from router_svc.api.parse import parse_body
from router_svc.api.structured import grammar_of
from tests.support.json_schemas.texts import Texts


@pytest.fixture(scope="module")
def texts() -> Texts:
    return Texts()


def grammar(text: str) -> str:
    body = {"model": "m", "prompt": "x", "structured_outputs": {"grammar": text}}
    return grammar_of(parse_body(CompletionBody, json.dumps(body).encode()))


@pytest.mark.parametrize(
    ("text", "good", "bad"),
    [
        (r"root ::= [\u00e9-\u00fc]+", ["é", "éü"], ["a", "\\"]),
        (r'root ::= "\u00e9\U0001F600\x41"', ["é😀A"], ["é"]),
        ("root ::= . .", ["a\n", "😀\r"], ["a"]),
        ("root ::= [a&&b]+", ["a&", "b"], ["c"]),
        ("root ::= [a~~b]+", ["a", "~b"], ["c"]),
        ("root ::= [+--]+", ["+,-"], ["a"]),
        ("root ::= [a-c--/]+", ["b-./"], ["a+"]),
        ("root ::= [-a]+ [a-]", ["-a", "a-"], ["+a"]),
        (r"root ::= [a\x2Dc]+", ["a-c"], ["b"]),
        (r"root ::= [^\]\[\\^]+", ["a"], ["]", "[", "\\", "^"]),
        (r"root ::= [\-\^]+", ["-^"], ["a", "\\"]),
        (r'root ::= "\"\\/\n"', ['"\\/\n'], ['"']),
        ('root ::= ("a"{1,2}){2} ("b"+)? # ("c"', ["aa", "aaaab", "aabb"], ["a", "aaaaa"]),
        ('root ::= ( "a"* ) {2} | start\nstart ::= "b" ', ["", "aaa", "b"], ["ab"]),
        ('root ::= ("a" # 1+\n)? "b" (\n"c")', ["abc", "bc"], ["ab", "ac"]),
        ('root ::= (("a"+))? "b"', ["b", "aab"], ["a"]),
        ('root ::= (("a"+)\n* "b") ("c"+ # d\n)?', ["b", "aab", "bcc"], ["a"]),
        ('root ::= ((("a"){2})){3} # the end', ["aaaaaa"], ["aa"]),
        ('root ::= start start- Start\nstart ::= "a"\nstart- ::= "b"\nStart ::= "c"', ["abc"], ["bbc", "aac"]),
        ('root ::= fooBar foo-bar 1a\nfooBar ::= "a"\nfoo-bar ::= "b"\n1a ::= "c"', ["abc"], ["bbc", "aac"]),
        (r'root ::= "\x7f\x01" [^] [^\x41]', ["\x7f\x01\nB"], ["\x7f\x01BA"]),
        ('root ::= "# no comment" [#"] ".[]"', ["# no comment#.[]"], ["# no comment#a[]"]),
    ],
)
def test_each_spelling_means_what_it_does_in_llama_cpp(
    texts: Texts, text: str, good: list[str], bad: list[str]
) -> None:
    compiled = texts.vocabulary.compile(grammar(text))
    assert [each for each in good if not texts.accepts(compiled, each)] == []
    assert [each for each in bad if texts.accepts(compiled, each)] == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (r"root ::= [\d]", r"\\d is no character"),
        (r'root ::= "\U00110000"', r"\\U00110000 is no character"),
        (r'root ::= "\ud800"', r"\\ud800 is no character"),
        (r'root ::= "\u12"', "Invalid"),
        ("root ::= [a", "Unexpected end"),
        ('root ::= "a', "Unexpected end"),
        ('root ::= ("a"', "Expected"),
        ('start ::= "a"', "root"),
        ("nothing at all", "not valid"),
    ],
)
def test_what_is_no_grammar_is_refused(text: str, problem: str) -> None:
    with pytest.raises(RequestError, match=problem) as caught:
        grammar(text)
    assert caught.value.param == "structured_outputs.grammar"


def test_a_grammar_without_rules_of_gbnf_is_in_larks_notation(texts: Texts) -> None:
    text = 'start: A "::="\nA: /[a-z]/+'
    assert not is_gbnf(text)
    assert texts.accepts(texts.vocabulary.compile(grammar(text)), "ab::=")


def test_a_grammar_of_many_rules_is_refused_before_it_is_converted() -> None:
    """The converter would need ten seconds."""
    many = "root ::= r0\n" + "".join(f"r{number} ::= r{number + 1}\n" for number in range(12_000)) + 'r12000 ::= "a"'
    with pytest.raises(RequestError, match="more than 1000 rules"):
        grammar(many)


@pytest.mark.parametrize("text", ["[", '"', '"a"[', "[\\", "\\", ") ", "*) ", "\n", "a-", "a ::= [ab"])
def test_respelling_takes_a_time_that_grows_with_the_length_alone(text: str) -> None:
    """Fails by the test's timeout where the time grows with the square of the length."""
    many = text * (500_000 // len(text))
    is_gbnf(many)
    respelled(many)
