"""Tools of a real cluster, with the official client: calls that can always be read, streamed and whole, and back."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import jsonschema
import pytest

from tests.support.cluster import MODEL, Cluster
from tests.support.lazily import openai

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 16}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TIME = {"type": "object", "properties": {"zone": {"type": "integer"}}, "additionalProperties": False}
SCHEMAS = {"get_weather": WEATHER, "get_time": TIME}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "The weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "get_time", "parameters": TIME, "strict": True}},
]
USER = {"role": "user", "content": "What is the weather in Paris? " * 8}
NAMED = {"type": "function", "function": {"name": "get_time"}}
NAMED_WEATHER = {"type": "function", "function": {"name": "get_weather"}}
ONE = {"parallel_tool_calls": False, "max_tokens": 120}


def _ask(cluster: Cluster, **options: Any) -> Any:
    fields: dict[str, Any] = {"model": MODEL, "messages": [USER], "tools": TOOLS, "temperature": 0} | options
    with cluster.client() as client:
        answer = client.chat.completions.create(**fields)
        return list(answer) if "stream" in options else answer


def _calls(choice: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]


def _streamed(chunks: Iterable[Any]) -> tuple[str, list[list[str]], str]:
    """Text, calls with id, name and arguments, and the reason of the end."""
    text, calls, reason = "", list[list[str]](), ""
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        text += choice.delta.content or ""
        for call in choice.delta.tool_calls or ():
            if call.index == len(calls):
                assert call.type == "function"
                calls.append([call.id, call.function.name, ""])
            calls[call.index][2] += call.function.arguments
        reason = choice.finish_reason or reason
    return text, calls, reason


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 3, "n": 3}])
def test_required_calls_are_valid_and_those_of_a_single_worker(
    cluster: Cluster, monolith: Cluster, options: dict[str, Any]
) -> None:
    answer = _ask(cluster, tool_choice="required", **ONE, **options)
    for choice in answer.choices:
        [(name, arguments)] = _calls(choice)
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])
        assert choice.message.content is None
        assert choice.finish_reason == "tool_calls"
    same = _ask(monolith, tool_choice="required", **ONE, **options)
    assert list(map(_calls, same.choices)) == list(map(_calls, answer.choices))


def test_a_stream_has_the_same_call_piece_by_piece(cluster: Cluster) -> None:
    chunks = _ask(cluster, tool_choice="required", stream=True, **ONE)
    text, [call], reason = _streamed(chunks)
    [whole] = _ask(cluster, tool_choice="required", **ONE).choices
    assert (text, [tuple(call[1:])], reason) == ("", _calls(whole), "tool_calls")
    pieces = [each for chunk in chunks for each in chunk.choices[0].delta.tool_calls or ()]
    assert len(pieces) > 5
    assert [each.id for each in pieces if each.id] == [call[0]]


def test_a_call_that_max_tokens_cuts_is_the_head_of_the_whole_one(cluster: Cluster) -> None:
    options = {"tool_choice": NAMED_WEATHER, "temperature": 1.0, "seed": 3}
    answer = _ask(cluster, **options, max_tokens=120)
    [(_, whole)] = _calls(answer.choices[0])
    seen = set()
    for behind in range(4, 20, 4):
        [choice] = _ask(cluster, **options, max_tokens=answer.usage.completion_tokens - behind).choices
        [(name, arguments)] = _calls(choice)
        assert (name, choice.finish_reason) == ("get_weather", "length")
        assert whole.startswith(arguments)
        seen.add(arguments)
    assert len(seen - {whole}) > 1


def test_a_named_function_is_called_once_and_ends_with_stop(cluster: Cluster) -> None:
    [choice] = _ask(cluster, tool_choice=NAMED, max_tokens=120).choices
    [(name, arguments)] = _calls(choice)
    assert name == "get_time"
    jsonschema.validate(json.loads(arguments), TIME)
    assert choice.finish_reason == "stop"


def test_some_tools_may_be_allowed(cluster: Cluster) -> None:
    allowed = {"mode": "required", "tools": [NAMED]}
    chosen = {"type": "allowed_tools", "allowed_tools": allowed}
    for seed in range(4):
        [choice] = _ask(cluster, tool_choice=chosen, temperature=1.0, seed=seed, **ONE).choices
        assert [name for name, _ in _calls(choice)] == ["get_time"]


def test_auto_is_text_where_the_model_calls_nothing_and_none_is_text_always(cluster: Cluster) -> None:
    plain = _ask(cluster, tool_choice="none", max_tokens=20).choices[0].message
    assert plain.content
    assert not plain.tool_calls
    assert _ask(cluster, max_tokens=20).choices[0].message.content == plain.content


def test_a_message_goes_on_but_not_within_a_call(cluster: Cluster) -> None:
    goes_on = {"add_generation_prompt": False, "continue_final_message": True}
    text = {"role": "assistant", "content": "The weather in Paris"}
    assert _ask(cluster, messages=[USER, text], max_tokens=10, extra_body=goes_on).choices[0].message.content
    opened = {"role": "assistant", "content": '<tool_call>\n{"name": "'}
    with pytest.raises(openai.BadRequestError, match="within a call"):
        _ask(cluster, messages=[USER, opened], max_tokens=10, extra_body=goes_on)


def test_results_go_back_and_are_seen(cluster: Cluster) -> None:
    message = _ask(cluster, tool_choice="required", **ONE).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "It is 21 degrees."}
    conversation = [USER, message.model_dump(exclude_none=True), result]
    answer = _ask(cluster, messages=conversation, max_tokens=10)
    assert answer.usage.prompt_tokens > _ask(cluster, max_tokens=1).usage.prompt_tokens + 20


_UNENFORCEABLE = {"type": "object", "properties": {"a": {"not": {}}}}
_STRICT = {"type": "function", "function": {"name": "f", "parameters": _UNENFORCEABLE, "strict": True}}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tools": [_STRICT]}, "tools[0].function.parameters.properties.a.not", "cannot be enforced"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}] * 2}, "tools", "same name"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice", "`other`"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "needs `tools`"),
    ],
)
def test_what_cannot_be_is_refused(cluster: Cluster, fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(openai.BadRequestError, match=words) as refused:
        _ask(cluster, max_tokens=5, **fields)
    assert refused.value.param == param


def test_without_strict_such_a_schema_allows_any_object(cluster: Cluster) -> None:
    loose = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"not": {}}}}}}
    [choice] = _ask(cluster, tools=[loose], tool_choice="required", **ONE).choices
    for _, arguments in _calls(choice):
        assert choice.finish_reason == "length" or isinstance(json.loads(arguments), dict)
