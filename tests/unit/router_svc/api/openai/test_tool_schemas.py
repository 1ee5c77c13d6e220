"""Schemas of tools are enforced as those of structured output; those that need not be allow any object otherwise."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.base.errors import RequestError
from router_svc.api.openai.chat_grammar import chat_grammar
from router_svc.api.openai.tools import Function, ToolUse
from router_svc.messages.formats import FORMATS
from router_svc.messages.grammar import Calls, Thinking
from tests.support.json_schemas.texts import Texts

#: Properties that equal names could stand for, which a grammar does not count.
COUNTED = {"type": "object", "minProperties": 3}
TYPED = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.fixture(scope="module")
def texts() -> Texts:
    return Texts()


def grammar_of(parameters: dict[str, Any], *, strict: bool) -> str:
    tools = [Function(name="f", parameters=parameters, strict=strict)]
    use = ToolUse(tools=tools, calls=Calls.REQUIRED, callable=[0], is_parallel=False)
    return chat_grammar(FORMATS["hermes"], use, Thinking.NONE, "", {})


def call(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'


def test_a_schema_that_cannot_be_enforced_allows_any_object_unless_it_is_strict(texts: Texts) -> None:
    grammar = texts.vocabulary.compile(grammar_of(COUNTED, strict=False))
    assert texts.accepts(grammar, call('{"a": 1}'))
    assert not texts.accepts(grammar, call("1"))
    with pytest.raises(RequestError) as refused:
        grammar_of(COUNTED, strict=True)
    assert refused.value.param == "tools[0].function.parameters.minProperties"


def test_an_argument_has_one_spelling(texts: Texts) -> None:
    grammar = texts.vocabulary.compile(grammar_of(TYPED, strict=False))
    assert texts.accepts(grammar, call('{"a": 1, "b": "x"}'))
    assert not texts.accepts(grammar, call('{"\\u0061": "x"}'))
