"""Items as the messages of a chat, and tools as its functions, with the way back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.base.errors import RequestError
from router_svc.api.parse import validate
from router_svc.api.responses.conversation import chat_messages, decode_thinking, encode_thinking
from router_svc.api.responses.custom_input import CustomInput
from router_svc.api.responses.schema import ResponsesBody
from router_svc.api.responses.tools import CalledTool, Names, chat_tools


def _body(**fields: Any) -> ResponsesBody:
    return validate(ResponsesBody, {"model": "m", "input": "x"} | fields)


def _messages(items: object, instructions: str | None = None) -> list[dict[str, Any]]:
    body = _body(input=items, instructions=instructions)
    return chat_messages(body.instructions, body.input)


def test_a_text_is_a_message_of_the_user() -> None:
    assert _messages("Hi") == [{"role": "user", "content": "Hi"}]


def test_instructions_and_what_the_developer_says_first_are_one_system_message() -> None:
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "B"}]},
        {"role": "system", "content": "C"},
        {"role": "user", "content": "Hi"},
        {"role": "developer", "content": "D"},
    ]
    assert _messages(items, "A") == [
        {"role": "system", "content": "A\n\nB\n\nC"},
        {"role": "user", "content": "Hi"},
        {"role": "system", "content": "D"},
    ]


def test_a_turn_of_the_assistant_is_one_message() -> None:
    items = [
        {"role": "user", "content": "Hi"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "id": "msg_1", "content": [{"type": "output_text", "text": "See."}]},
        {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "put", "arguments": '{"a": 1}'},
        {"type": "custom_tool_call", "call_id": "call_2", "name": "run", "namespace": "shell", "input": 'echo "ä"'},
        {"type": "function_call_output", "call_id": "call_1", "output": "done"},
        {"type": "custom_tool_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "ä"}]},
        {"type": "message", "role": "assistant", "content": "Good."},
        {"type": "message", "role": "assistant", "content": "Bye."},
    ]
    calls = [
        {"id": "call_1", "type": "function", "function": {"name": "put", "arguments": '{"a": 1}'}},
        {
            "id": "call_2",
            "type": "function",
            "function": {"name": "shell.run", "arguments": '{"input": "echo \\"ä\\""}'},
        },
    ]
    assert _messages(items) == [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "See.", "reasoning": "Hm.", "tool_calls": calls},
        {"role": "tool", "content": "done", "tool_call_id": "call_1"},
        {"role": "tool", "content": "ä", "tool_call_id": "call_2"},
        {"role": "assistant", "content": "Good."},
        {"role": "assistant", "content": "Bye."},
    ]


def test_thinking_comes_back_in_the_form_that_clients_keep() -> None:
    item = {"type": "reasoning", "summary": [], "encrypted_content": encode_thinking("Hm. ä")}
    call = {"type": "function_call", "call_id": "1", "name": "put", "arguments": "{}"}
    [message] = _messages([item, call])
    assert (message["reasoning"], message["tool_calls"][0]["function"]["name"]) == ("Hm. ä", "put")


@pytest.mark.parametrize("encoded", ["", "gAAAAAB", "pdserve1.%%%", "pdserve1./w==", "pdserve1." + "A" * 5_000_000])
def test_thinking_of_other_servers_is_left_out(encoded: str) -> None:
    assert decode_thinking(encoded) == ""
    assert _messages([{"role": "user", "content": "x"}, {"type": "reasoning", "encrypted_content": encoded}]) == [
        {"role": "user", "content": "x"}
    ]


@pytest.mark.parametrize(
    ("fields", "text", "param"),
    [
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "is required", "input[0].call_id"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "may only have texts",
            "input[0].content",
        ),
        ({"input": []}, "1 to 4096 items", "input"),
        ({"input": [7]}, "dictionary", "input[0]"),
        ({"input": [{"type": "item_reference"}]}, "is required", "input[0].id"),
        ({"tools": [{"type": "function"}]}, "is required", "tools[0].name"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": []}]}, "1 to 256 tools", "tools[0].tools"),
        ({"max_output_tokens": 0}, "greater than or equal to 1", "max_output_tokens"),
    ],
)
def test_an_error_says_where_and_what(fields: dict[str, Any], text: str, param: str) -> None:
    with pytest.raises(RequestError, match=text) as raised:
        _body(**fields)
    assert raised.value.param == param


def test_unknown_fields_of_agents_are_ignored_by_name() -> None:
    """Agents send beta fields: claude-code#21612, #51700."""
    item = {"type": "message", "role": "user", "content": "x", "phase": "commentary"}
    body = _body(client_metadata={"a": 1}, prompt_cache_options={}, functions=[1], input=[item])
    assert body.ignored_fields == ("client_metadata", "prompt_cache_options", "functions")
    assert body.metadata is None


def test_what_is_labelled_is_kept() -> None:
    body = _body(metadata={"a": "b"}, user="me", store=False, prompt_cache_key="k", safety_identifier="s")
    assert (body.metadata, body.user, body.prompt_cache_key, body.ignored_fields) == ({"a": "b"}, "me", "k", ())


def test_names_of_tools_come_back() -> None:
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /x/"}
    members = [{"type": "custom", "name": "run"}, {"type": "function", "name": "f"}]
    tools = [
        {"type": "function", "name": "put", "parameters": {"type": "object"}, "strict": True},
        {"type": "custom", "name": "patch", "description": "Edits.", "format": grammar},
        {"type": "web_search"},
        {"type": "namespace", "name": "shell", "tools": members},
    ]
    shown, names = chat_tools(_body(tools=tools).tools or ())
    assert [each["function"]["name"] for each in shown] == ["put", "patch", "shell.run", "shell.f"]
    assert "start: /x/" in shown[1]["function"]["description"]
    assert shown[1]["function"]["parameters"]["required"] == ["input"]
    again = Names.from_record(json.loads(json.dumps(names.to_record())))
    for each in (names, again):
        assert each.of("put") == CalledTool(name="put")
        assert each.of("patch") == CalledTool(name="patch", is_custom=True)
        assert each.of("shell.run") == CalledTool(name="run", namespace="shell", is_custom=True)
        assert each.of("shell.f") == CalledTool(name="f", namespace="shell")
    assert "put" not in names.to_record()


def test_a_name_that_is_too_long_with_its_namespace_is_refused_by_the_clients_field() -> None:
    long = "n" * 127
    call = {"type": "function_call", "call_id": "1", "name": "f", "namespace": long, "arguments": "{}"}
    with pytest.raises(RequestError, match=r"`f` in a namespace.* 129 characters") as raised:
        chat_messages(None, _body(input=[call]).input)
    assert raised.value.param == "input"
    tools = [{"type": "namespace", "name": long, "tools": [{"type": "function", "name": "f"}]}]
    with pytest.raises(RequestError, match=r"`tools` has the tool `f`") as raised:
        chat_tools(_body(tools=tools).tools or ())
    assert raised.value.param == "tools"
    assert chat_messages(None, _body(input=[call | {"namespace": "n" * 126}]).input)


@given(st.text(), st.data())
def test_the_input_of_a_custom_tool_is_the_same_for_any_split(text: str, data: st.DataObject) -> None:
    spaces = st.sampled_from(["", " ", "\n  "])
    arguments = "{{{}{}{}:{}{}{}}}".format(
        data.draw(spaces),
        '"input"',
        data.draw(spaces),
        data.draw(spaces),
        json.dumps(text, ensure_ascii=data.draw(st.booleans())),
        data.draw(spaces),
    )
    cuts = sorted(data.draw(st.lists(st.integers(0, len(arguments)), max_size=len(arguments))))
    reader, found = CustomInput(), ""
    for start, end in zip([0, *cuts], [*cuts, len(arguments)], strict=True):
        found += reader.add(arguments[start:end])
        assert text.startswith(found)
    assert found == text
