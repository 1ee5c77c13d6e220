"""What tools of requests mean, and that none of them can break the router."""

from __future__ import annotations

from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from pdserve.base.errors import RequestError, TooLarge
from router_svc.api.openai.chat_grammar import chat_grammar
from router_svc.api.openai.messages import ChatMessage
from router_svc.api.openai.tools import AllowedToolsChoice, Tool, ToolUse, tool_use
from router_svc.messages.formats import FORMATS, MessageFormat
from router_svc.messages.grammar import Calls, Thinking
from router_svc.messages.template import read_template


def _use(*parameters: dict[str, Any], strict: bool | None = None) -> ToolUse:
    functions = [{"name": f"f{index}", "parameters": each, "strict": strict} for index, each in enumerate(parameters)]
    tools = [Tool.model_validate({"type": "function", "function": function}) for function in functions]
    return tool_use(tools, "auto", is_parallel=True)


def _grammar(form: str, use: ToolUse) -> str:
    return chat_grammar(FORMATS[form], use, Thinking.NONE, "", {})


def _is_message(grammar: str, text: str) -> bool:
    matcher, tokens = LLMatcher(LLTokenizer("byte"), grammar, log_level=0), list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def test_types_follow_references_and_options_and_odd_ones_are_none() -> None:
    schema = {
        "$defs": {"A": {"type": "object"}, "B": {"$ref": "#/$defs/B"}},
        "properties": {
            "a": {"$ref": "#/$defs/A"},
            "b": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "c": {"$ref": "#/$defs/B"},
            "d": {"type": ["string", {"x": 1}]},
            "e": {"enum": ["x", "y"]},
            "f": {},
        },
    }
    [types] = _use(schema).types().values()
    assert types == {
        "a": {"object"},
        "b": {"integer", "null"},
        "c": frozenset(),
        "d": {"string"},
        "e": {"string"},
        "f": frozenset(),
    }


def test_references_that_multiply_each_other_are_looked_at_once() -> None:
    """Each once for each path, these are ten billion, on the event loop."""
    options = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 10} for i in range(10)}
    schema = {"$defs": options | {"d10": {"type": "integer"}}, "properties": {"a": {"$ref": "#/$defs/d0"}}}
    [types] = _use(schema).types().values()
    assert types == {"a": {"integer"}}


def test_types_of_more_schemas_than_are_looked_at_are_unknown() -> None:
    wide = {"properties": {f"p{i}": {"anyOf": [{"type": "integer"} for _ in range(300)]} for i in range(40)}}
    first, *_, last = _use(wide).types()["f0"].values()
    assert first == {"integer"}
    assert last == frozenset()


def test_nested_models_are_json_in_qwen3_coder() -> None:
    schema = {
        "$defs": {"A": {"type": "object", "properties": {"c": {"type": "string"}}, "required": ["c"]}},
        "properties": {"a": {"$ref": "#/$defs/A"}, "n": {"anyOf": [{"type": "integer"}, {"type": "null"}]}},
    }
    assert _grammar("qwen3_coder", _use(schema)).count('"json_schema"') == 2
    assert _grammar("qwen3_coder", _use(schema, strict=True)).count('"json_schema"') == 2
    with pytest.raises(RequestError, match="a name that this model's form of calls cannot have"):
        _grammar("qwen3_coder", _use({"properties": {"a>b": {}}}))


def test_tools_that_are_too_large_are_refused_before_all_are_read() -> None:
    many = [{"properties": {f"property_{index}": {"type": "integer"} for index in range(1000)}}] * 200
    with pytest.raises(TooLarge, match="`tools` make a grammar of more than"):
        _grammar("hermes", _use(*many))


def test_a_form_that_is_only_read_takes_structured_output_with_tools() -> None:
    described = {"start_anchor": "a", "fields": {"content": {}}}
    form = MessageFormat(name="own", template=read_template(described, "own"))
    text = '{"grammars": [{"json_schema": {"type": "object"}}]}'
    assert "json_schema" in chat_grammar(form, _use({}), Thinking.NONE, text, {})
    assert chat_grammar(form, _use({}), Thinking.NONE, "", {}) == ""
    required = ToolUse(tools=_use({}).tools, calls=Calls.REQUIRED, callable=[0])
    with pytest.raises(RequestError, match="--message-format"):
        chat_grammar(form, required, Thinking.NONE, "", {})


@pytest.mark.parametrize("arguments", ["[" * 900 + "]" * 900, '{"a":' * 90 + "1" + "}" * 90, "[1]", "nonsense", "[[],"])
def test_arguments_that_are_no_object_within_bounds_stay_text(arguments: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    message = ChatMessage.model_validate({"role": "assistant", "tool_calls": [call]})
    assert message.for_template()["tool_calls"][0]["function"]["arguments"] == arguments


def test_tools_that_are_allowed_may_be_called_and_need_not_be() -> None:
    tools = [Tool.model_validate({"type": "function", "function": {"name": name}}) for name in ("a", "b", "c")]
    named = [{"type": "function", "function": {"name": name}} for name in ("c", "a", "c")]
    given = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": named}}
    use = tool_use(tools, AllowedToolsChoice.model_validate(given), is_parallel=True)
    assert (use.calls, use.names, use.is_named, use.is_parallel) == (Calls.AUTO, ["c", "a"], False, True)
    # The model sees all of them, so that prompts keep their cached prefix.
    assert [each["function"]["name"] for each in use.for_template] == ["a", "b", "c"]
    grammar = _grammar("hermes", use)
    texts = {name: f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>' for name in "abc"}
    assert all(_is_message(grammar, text) for text in ("Hello.", "", texts["a"], texts["c"]))
    assert not _is_message(grammar, texts["b"])


def test_every_form_has_a_grammar() -> None:
    use = _use({"properties": {"city": {"type": "string"}}, "required": ["city"]}, {})
    for form in FORMATS:
        assert "f0" in _grammar(form, use)
