"""Bodies of the Messages API: what they mean as chats, what is ignored and reported, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdserve.base.errors import RequestError
from router_svc.api.anthropic.schema import ConversationBody, MessagesBody
from router_svc.api.openai.tools import FunctionName, NamedTool
from router_svc.api.parse import parse_body

USER = {"role": "user", "content": "Hi"}
TOOL = {"name": "put", "input_schema": {"type": "object"}}
CALL = {"type": "tool_use", "id": "toolu_0123456789abcdef", "name": "put", "input": {"a": [1.5, "é"]}}
BILLED = "x-anthropic-billing-header: cc_version=2.1.100.7b4; cc_entrypoint=cli; cch={};"


def body_of(**fields: Any) -> MessagesBody:
    return parse_body(MessagesBody, json.dumps({"model": "m", "max_tokens": 5, "messages": [USER]} | fields).encode())


def shown(**fields: Any) -> list[dict[str, Any]]:
    """The conversation as the template reads it."""
    return [message.for_template() for message in body_of(**fields).chat.messages]


def _result(content: object, **more: object) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": CALL["id"], "content": content, **more}


def test_a_text_is_one_block_and_blocks_are_joined_by_newlines() -> None:
    blocks = [{"type": "text", "text": "Hi"}, {"type": "text", "text": "you", "cache_control": {"type": "ephemeral"}}]
    assert shown(system="Be brief.", messages=[USER | {"content": blocks}]) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi\nyou"},
    ]
    assert shown(system=blocks) == [{"role": "system", "content": "Hi\nyou"}, {"role": "user", "content": "Hi"}]


def test_calls_and_their_results_are_those_of_a_chat() -> None:
    answer = [{"type": "thinking", "thinking": "Hm.", "signature": "x"}, {"type": "text", "text": "See."}, CALL]
    results = [_result([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]), {"type": "text", "text": "Go"}]
    messages = [USER, {"role": "assistant", "content": answer}, {"role": "user", "content": results}]
    name_and_input = {"name": "put", "arguments": {"a": [1.5, "é"]}}
    assert shown(messages=messages) == [
        USER,
        {
            "role": "assistant",
            "content": "See.",
            "tool_calls": [{"type": "function", "id": "0123456789abcdef", "function": name_and_input}],
            "reasoning": "Hm.",
            "reasoning_content": "Hm.",
        },
        {"role": "tool", "content": "a\nb", "tool_call_id": "0123456789abcdef"},
        {"role": "user", "content": "Go"},
    ]


@pytest.mark.parametrize("signature", [{}, {"signature": ""}, {"signature": "of another server"}])
def test_thinking_comes_back_with_any_signature_or_none(signature: dict[str, str]) -> None:
    answer = [{"type": "thinking", "thinking": "Hm.", **signature}, {"type": "redacted_thinking", "data": "AAAA"}]
    messages = [USER, {"role": "assistant", "content": [*answer, {"type": "text", "text": "A"}]}, USER]
    assert shown(messages=messages)[1]["reasoning_content"] == "Hm."


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (_result("It failed", is_error=True), "Error: It failed"),
        (_result(None), ""),
        (_result([]), ""),
        (_result("It works", is_error=False), "It works"),
    ],
)
def test_a_result_may_be_an_error_or_empty(result: dict[str, Any], text: str) -> None:
    messages = [USER, {"role": "assistant", "content": [CALL]}, {"role": "user", "content": [result]}]
    assert shown(messages=messages)[-1] == {"role": "tool", "content": text, "tool_call_id": "0123456789abcdef"}


def test_neighbours_of_one_role_are_one_message() -> None:
    messages = [USER, USER | {"content": "you"}, {"role": "assistant", "content": "A"}]
    messages += [{"role": "assistant", "content": [CALL]}, {"role": "user", "content": [_result("x")]}]
    roles = [(message["role"], message["content"]) for message in shown(messages=messages)]
    assert roles == [("user", "Hi\nyou"), ("assistant", "A"), ("tool", "x")]


def test_a_system_message_is_the_first_or_text_of_the_user() -> None:
    """Claude Code sends some in the middle, where many templates refuse them."""
    late = {"role": "system", "content": [{"type": "text", "text": "Late."}]}
    assert shown(system="S", messages=[{"role": "system", "content": "T"}, USER, late]) == [
        {"role": "system", "content": "S\nT"},
        {"role": "user", "content": "Hi\nLate."},
    ]


@pytest.mark.parametrize("form", ["block", "line", "text"])
def test_the_billing_line_is_not_in_the_prompt(form: str) -> None:
    """It is another one in each request, so that no prefix was reused: vllm#36829, ollama#14918."""

    def system(cch: str) -> object:
        line = BILLED.format(cch)
        if form == "text":
            return f"{line}\nYou are a tool."
        blocks = [line, "You are a tool."] if form == "block" else [f"{line}\nYou are a tool."]
        return [{"type": "text", "text": text} for text in blocks]

    assert shown(system=system("eb6c6")) == shown(system=system("71fea"))
    assert shown(system=system("eb6c6"))[0] == {"role": "system", "content": "You are a tool."}


def test_a_billing_line_elsewhere_is_text() -> None:
    quoted = f"What is\n{BILLED.format('00000')}"
    assert shown(system=quoted, messages=[USER | {"content": BILLED}]) == [
        {"role": "system", "content": quoted},
        {"role": "user", "content": BILLED},
    ]
    assert shown(system=BILLED) == [USER]


def test_unknown_fields_are_named_at_any_depth_and_nothing_is_refused() -> None:
    """Strict servers are unusable: claude-code#21612, #51700."""
    block = {"type": "text", "text": "x", "cursor": 1, "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    body = body_of(
        context_management={"edits": []},
        mcp_servers=[{"url": "x"}],
        metadata={"user_id": "u"},
        service_tier="auto",
        cache_control=None,
        audio={"voice": "a"},
        system=[block],
        messages=[{"role": "user", "content": [block, block], "id": "x"}],
        tools=[TOOL | {"eager_input_streaming": True, "cache_control": {"type": "ephemeral"}}],
        thinking={"type": "adaptive", "display": "summarized", "budget_tokens": 1024},
        tool_choice={"type": "none", "why": 1},
        _chat="x",
    )
    assert set(body.ignored_fields) == {
        "context_management",
        "mcp_servers",
        "audio",
        "_chat",
        "system[].cursor",
        "messages[].id",
        "messages[].content[].cursor",
        "tools[].eager_input_streaming",
        "tool_choice.why",
        "thinking.budget_tokens",
    }
    assert body_of().ignored_fields == ()
    [name] = body_of(messages=[USER | {"x" * 1000: 1}]).ignored_fields
    assert name == "messages[]." + "x" * 89, "no header gets longer by a name"


@pytest.mark.parametrize(
    ("fields", "chat"),
    [
        ({}, {"reasoning_effort": None, "chat_template_kwargs": None, "include_reasoning": None}),
        ({"thinking": {"type": "disabled"}}, {"reasoning_effort": "none", "include_reasoning": False}),
        (
            {"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}},
            {"reasoning_effort": "none", "include_reasoning": False},
        ),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 2048}},
            {"reasoning_effort": None, "chat_template_kwargs": {"enable_thinking": True, "thinking": True}},
        ),
        ({"output_config": {"effort": "xhigh"}}, {"reasoning_effort": "xhigh"}),
        (
            {"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}},
            {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": True, "thinking": True}},
        ),
        ({"tools": [TOOL], "tool_choice": {"type": "any"}}, {"tool_choice": "any", "parallel_tool_calls": True}),
        (
            {"tools": [TOOL], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
            {"tool_choice": "auto", "parallel_tool_calls": False},
        ),
        ({"tools": [TOOL], "tool_choice": {"type": "none"}}, {"tool_choice": "none", "parallel_tool_calls": True}),
        (
            {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "put", "disable_parallel_tool_use": True}},
            {
                "tool_choice": NamedTool(type="function", function=FunctionName(name="put")),
                "parallel_tool_calls": False,
            },
        ),
        ({"stop_sequences": ["\n\nHuman:"]}, {"stop": ["\n\nHuman:"]}),
        ({"temperature": 0.5, "top_p": 0.9, "top_k": 40}, {"temperature": 0.5, "top_p": 0.9, "top_k": 40}),
        ({"stream": True, "seed": 3, "cache_salt": "a", "priority": 1}, {"stream": True, "seed": 3, "priority": 1}),
        ({"max_tokens": 7}, {"max_tokens": None, "max_completion_tokens": None, "n": None}),
    ],
)
def test_fields_are_those_of_a_chat(fields: dict[str, Any], chat: dict[str, Any]) -> None:
    made = body_of(**fields).chat
    assert {name: getattr(made, name) for name in chat} == chat


@pytest.mark.parametrize("name", ["output_config", "output_format"])
def test_a_schema_of_the_output_is_that_of_a_chat(name: str) -> None:
    form = {"type": "json_schema", "schema": {"type": "integer"}}
    made = body_of(**{name: {"format": form} if name == "output_config" else form}).chat.response_format
    assert made is not None
    assert made.type == "json_schema"
    assert made.json_schema.json_schema == {"type": "integer"}
    with pytest.raises(RequestError, match="only one"):
        body_of(output_config={"format": form}, output_format=form)


def test_the_answer_goes_on_with_a_last_message_of_the_assistant() -> None:
    chat = body_of(messages=[USER, {"role": "assistant", "content": "The"}]).chat
    assert (chat.add_generation_prompt, chat.continue_final_message) == (False, True)
    chat = body_of().chat
    assert (chat.add_generation_prompt, chat.continue_final_message) == (True, False)


def test_a_count_has_the_conversation_of_the_message() -> None:
    fields = {"model": "m", "messages": [USER], "system": "S", "tools": [TOOL], "thinking": {"type": "disabled"}}
    counted = parse_body(ConversationBody, json.dumps(fields).encode()).chat
    assert body_of(**fields).chat.model_dump(exclude={"stream"}) == counted.model_dump(exclude={"stream"})


def _assistant(*content: dict[str, Any]) -> list[dict[str, Any]]:
    return [USER, {"role": "assistant", "content": list(content)}]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"max_tokens": None}, "max_tokens", "valid integer"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [USER | {"role": "tool"}]}, "messages[0]", "user, assistant or system"),
        ({"system": [{"type": "document"}]}, "system[0]", "documents"),
        ({"messages": [USER | {"content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0]", "images"),
        ({"messages": [USER | {"content": [{"type": "document"}]}]}, "messages[0].content[0]", "documents"),
        (
            {"messages": [USER | {"content": [_result([{"type": "image"}])]}]},
            "messages[0].content[0].content[0]",
            "images",
        ),
        ({"messages": [USER | {"content": [CALL]}]}, "messages[0].content[0]", "text or tool_result"),
        ({"messages": _assistant(_result("x"))}, "messages[1].content[0]", "tool_use"),
        ({"messages": [USER | {"content": 3}]}, "messages[0].content", "a list of blocks"),
        ({"messages": [USER | {"content": [{"type": "text", "text": 3}]}]}, "messages[0].content[0].text", "string"),
        ({"messages": _assistant(CALL)}, "messages", "Add a tool_result"),
        ({"messages": _assistant({"type": "text", "text": " "})}, "messages", "no text to go on with"),
        ({"messages": [*_assistant(*[CALL] * 129), USER]}, "messages", "more than 128 blocks"),
        ({"messages": [{"role": "system", "content": ""}]}, "messages", "have no text"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]", "tool of another server"),
        ({"tools": [TOOL | {"name": "a b"}]}, "tools[0].name", "pattern"),
        ({"tool_choice": {"type": "required"}}, "tool_choice", "auto, any, tool or none"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name", "required"),
        ({"thinking": {"type": "on"}}, "thinking.type", "'adaptive'"),
        ({"stop_sequences": ["x"] * 5}, "stop_sequences", "at most 4"),
        ({"stop_sequences": [""]}, "stop_sequences[0]", "at least 1"),
        ({"temperature": 2.1}, "temperature", "less than or equal to 2"),
        ({"output_config": {"format": {"type": "text"}}}, "output_config.format.type", "json_schema"),
    ],
)
def test_what_cannot_be_is_refused_with_its_path(fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(RequestError, match=words) as refused:
        body_of(**fields)
    assert refused.value.param == param
