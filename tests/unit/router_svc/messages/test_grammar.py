"""What the grammars of messages accept: each family's own calls, and nothing that looks like a call and is none."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from router_svc.message_formats import FORMAT_NAMES
from router_svc.messages.formats import FORMATS
from router_svc.messages.grammar import CallableTool, Calls, MessageRules, Thinking, message_grammar
from router_svc.messages.parameter_grammar import Parameter

_BYTES = LLTokenizer("byte")
_CITY: Mapping[str, Any] = {
    "json_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_pattern": "[ ]"},
    }
}
_PARAMETERS = [
    Parameter(name="city", is_required=True),
    Parameter(name="days", is_required=False, grammars=[{"json_schema": {"type": "integer"}}]),
    Parameter(name="unit", is_required=False, options=["C", "F"]),
]
TOOLS = [
    CallableTool(name="get_weather", arguments=[_CITY], parameters=_PARAMETERS),
    CallableTool(name="put", arguments=[{"json_schema": {"type": "object", "maxProperties": 0}}]),
]
_WEATHER, _OPEN, _CLOSE = '{"city": "x"}', "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
#: Two calls as each family writes them.
TWO_CALLS = {
    "hermes": f'<tool_call>\n{{"name": "get_weather", "arguments": {_WEATHER}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "put", "arguments": {}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\nx </function> y\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n<parameter=unit>\nC\n</parameter>\n</function>\n</tool_call>\n"
    "<tool_call>\n<function=put>\n</function>\n</tool_call>",
    "llama3_json": f'{{"name": "get_weather", "parameters": {_WEATHER}}}; {{"name": "put", "parameters": {{}}}}',
    "mistral": f"[TOOL_CALLS]get_weather[ARGS]{_WEATHER}[TOOL_CALLS]put[ARGS]{{}}",
    "mistral_list": f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {_WEATHER}}}, '
    '{"name": "put", "arguments": {}}]',
    "deepseek_v3": f"<｜tool▁calls▁begin｜>{_OPEN}function<｜tool▁sep｜>get_weather\n```json\n{_WEATHER}\n```{_CLOSE}\n"
    f"{_OPEN}function<｜tool▁sep｜>put\n```json\n{{}}\n```{_CLOSE}<｜tool▁calls▁end｜>",
    "deepseek_v31": f"<｜tool▁calls▁begin｜>{_OPEN}get_weather<｜tool▁sep｜>{_WEATHER}{_CLOSE}"
    f"{_OPEN}put<｜tool▁sep｜>{{}}{_CLOSE}<｜tool▁calls▁end｜>",
    "gpt_oss": f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{_WEATHER}"
    "<|channel|>commentary to=functions.put <|constrain|>json<|message|>{}",
}


def _accepts(form: str, rules: MessageRules, text: str) -> bool:
    """Whether the text is a whole message."""
    matcher = LLMatcher(_BYTES, message_grammar(FORMATS[form], rules, {}), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def _rules(calls: Calls, **more: Any) -> MessageRules:
    return MessageRules(calls=calls, tools=TOOLS, **more)


@pytest.mark.parametrize(("form", "calls"), list(itertools.product(FORMAT_NAMES, (Calls.AUTO, Calls.REQUIRED))))
def test_calls_of_the_family_are_accepted_and_none_of_other_functions_or_arguments(form: str, calls: Calls) -> None:
    text = TWO_CALLS[form]
    assert _accepts(form, _rules(calls), text)
    assert not _accepts(form, _rules(calls), text.replace("get_weather", "get_time"))
    assert not _accepts(form, _rules(calls), text.replace("city", "town"))
    assert not _accepts(form, _rules(calls, is_parallel=False), text)


@pytest.mark.parametrize("form", FORMAT_NAMES)
def test_text_is_free_unless_a_call_is_required(form: str) -> None:
    text = FORMATS[form].text_opening + "It is <tool and {warm}.\n"
    assert _accepts(form, _rules(Calls.AUTO), text)
    assert _accepts(form, _rules(Calls.NONE), text)
    assert not _accepts(form, _rules(Calls.REQUIRED), text)
    # Without calls, JSON is as good a text as any.
    assert _accepts(form, _rules(Calls.NONE), TWO_CALLS[form]) is (form == "llama3_json")


@pytest.mark.parametrize("form", [name for name in FORMAT_NAMES if FORMATS[name].thinking is not None])
@pytest.mark.parametrize("calls", [Calls.AUTO, Calls.REQUIRED])
def test_thinking_comes_first_and_may_speak_of_calls(form: str, calls: Calls) -> None:
    thinking = FORMATS[form].thinking
    assert thinking is not None
    trigger = "" if form == "gpt_oss" else "<tool_call>"
    rest = f"Hm, {trigger}.{thinking[1]}{TWO_CALLS[form]}"
    assert _accepts(form, _rules(calls, thinking=Thinking.OPTIONAL), thinking[0] + rest)
    assert _accepts(form, _rules(calls, thinking=Thinking.OPTIONAL), TWO_CALLS[form])
    assert _accepts(form, _rules(calls, thinking=Thinking.OPENED), rest)
    assert not _accepts(form, _rules(calls, thinking=Thinking.OPENED), "Hm")


def test_structured_text_begins_behind_the_thinking_and_is_no_call() -> None:
    """One grammar has both, so that nothing has to switch it on: vllm#44012, #50938."""
    rules = MessageRules(thinking=Thinking.OPTIONAL, text=[_CITY])
    assert _accepts("hermes", rules, '<think>\nany "text"\n</think>\n\n{"city": "x"}')
    assert _accepts("hermes", rules, '{"city": "x"}')
    assert not _accepts("hermes", rules, "<think>\nHm.\n</think>\n\nHello")
    both = _rules(Calls.AUTO, text=[_CITY])
    assert _accepts("hermes", both, '{"city": "x"}')
    assert _accepts("hermes", both, TWO_CALLS["hermes"])
    assert not _accepts("hermes", both, "Hello")


def test_gpt_oss_may_speak_before_it_calls() -> None:
    text = "<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant" + TWO_CALLS["gpt_oss"]
    assert _accepts("gpt_oss", _rules(Calls.AUTO), text)


@pytest.mark.parametrize("form", FORMAT_NAMES)
def test_what_the_parser_takes_for_a_call_in_free_text_is_held_to_its_schema(form: str) -> None:
    """The parser must open no call that the grammar does not: llama's `type` first, qwen's missing tag."""
    variants = {
        "llama3_json": '{"type": "function", "name": "get_weather", "parameters": {"town": "x"}}',
        "qwen3_coder": "It is <function=nosuch>\n</function>",
        "hermes": '<tool_call>{"name": "get_weather", "arguments": {"town": "x"}}</tool_call>',
    }
    if form in variants:
        assert not _accepts(form, _rules(Calls.AUTO), variants[form])


def test_what_is_a_special_token_is_one_in_the_grammar() -> None:
    grammar = message_grammar(FORMATS["mistral"], _rules(Calls.AUTO), {"[TOOL_CALLS]": 5, "[ARGS]": 6, "[INST]": 3})
    assert "<[5]>" in grammar
    assert "<[6]>" in grammar
    assert "TOOL_CALLS" not in grammar
