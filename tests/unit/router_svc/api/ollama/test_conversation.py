"""Messages and tools of Ollama's API as those of chats."""

from __future__ import annotations

import json
from typing import Any

import pytest

from router_svc.api.ollama.schema import OllamaChatBody, OllamaGenerateBody
from router_svc.api.parse import parse_body

USER = {"role": "user", "content": "x"}


def chat_of(*messages: dict[str, Any], **fields: Any) -> OllamaChatBody:
    return parse_body(OllamaChatBody, json.dumps({"model": "m", "messages": messages} | fields).encode())


def _calls(*calls: str | tuple[str, str]) -> dict[str, Any]:
    given = [(call, None) if isinstance(call, str) else call for call in calls]
    functions = [{"function": {"name": name, "arguments": {}}} | ({"id": own} if own else {}) for name, own in given]
    return {"role": "assistant", "content": "", "tool_calls": functions}


def _result(name: str | None = None, **fields: str) -> dict[str, Any]:
    return {"role": "tool", "content": "y"} | ({"tool_name": name} if name else {}) | fields


def _pairs(*messages: dict[str, Any]) -> list[str | None]:
    """The name of the call that each result belongs to."""
    shown = [message.for_template() for message in chat_of(USER, *messages).chat.messages]
    names = {call["id"]: call["function"]["name"] for each in shown for call in each.get("tool_calls", ())}
    return [names.get(each.get("tool_call_id")) for each in shown if each["role"] == "tool"]


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ((_calls("a"), _result("a")), ["a"]),
        ((_calls("a", "b"), _result("b"), _result("a")), ["b", "a"]),
        ((_calls("a", "b"), _result(), _result()), ["a", "b"]),
        ((_calls("a"), _result("a"), _calls("b"), _result()), ["a", "b"]),
        ((_calls("a"), _result("c")), [None]),
        ((_calls("a"), _result("a"), _result("a")), ["a", None]),
        ((_calls(("a", "id-1"), ("b", "id-2")), _result(tool_call_id="id-2")), ["b"]),
        ((_result("a"),), [None]),
    ],
)
def test_a_result_belongs_to_the_first_call_of_its_name_without_one(
    messages: tuple[dict[str, Any], ...], expected: list[str | None]
) -> None:
    assert _pairs(*messages) == expected


def test_ids_are_nine_characters_and_each_is_another_one() -> None:
    """Templates of Mistral refuse others."""
    chat = chat_of(USER, _calls("a", "a"), _result(), _result(), _calls("a"), _result()).chat
    ids = [call.id or "" for message in chat.messages for call in message.tool_calls or ()]
    assert len({*ids}) == 3
    assert all(len(each) == 9 and each.isalnum() for each in ids)


def test_the_answer_goes_on_with_a_last_message_of_the_assistant() -> None:
    assert chat_of(USER, {"role": "assistant", "content": "The"}).chat.continue_final_message
    for last in ({"role": "assistant", "content": " "}, {"role": "assistant"}, _calls("a"), USER):
        chat = chat_of(USER, last).chat
        assert (chat.continue_final_message, chat.add_generation_prompt) == (False, True)


@pytest.mark.parametrize(("given", "meant"), [(None, None), (-1, None), (-2, None), (0, None), (1, 1), (9, 9)])
def test_negative_numbers_of_tokens_and_none_are_no_limit(given: int | None, meant: int | None) -> None:
    assert chat_of(USER, options={"num_predict": given}).max_tokens == meant


def test_a_stream_is_the_default() -> None:
    for value, is_streamed in ((None, True), (True, True), (False, False)):
        assert chat_of(USER, stream=value).chat.stream is is_streamed
        body = parse_body(OllamaGenerateBody, json.dumps({"model": "m", "prompt": "x", "stream": value}).encode())
        assert body.meant.stream is is_streamed
    assert chat_of(USER).chat.stream is True


def test_unknown_fields_are_named_at_any_depth_and_nothing_is_refused() -> None:
    tool = {"type": "function", "function": {"name": "f", "strict": True}}
    body = chat_of(USER | {"more": 1}, tools=[tool], keep_alive=0, options={"num_ctx": 9}, top_logprobs=1)
    assert {*body.ignored_fields} == {
        "keep_alive",
        "top_logprobs",
        "messages[].more",
        "options.num_ctx",
        "tools[].function.strict",
    }
    assert not chat_of(USER).ignored_fields
