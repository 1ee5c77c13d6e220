"""Thinking and calls of models that write them, from the template to the client, with what the workers get."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pdserve.cli.private_redis import PrivateRedis
from tests.integration.router_svc.api.conftest import TEMPLATE
from tests.integration.router_svc.conftest import ScriptedCluster, open_cluster
from tests.integration.router_svc.request.support import ONE_OF_EACH
from tests.support.own_task import in_own_task
from tests.support.tiny_model import END, NAME, tokens_of, write_model

_TOOLS = [{"type": "function", "function": {"name": "put", "parameters": {"properties": {"a": {"type": "integer"}}}}}]
_THOUGHT, _CALL = "<think>\nHm.\n</think>\n\n", '<tool_call>\n{"name": "put", "arguments": {"a": 1}}\n</tool_call>'


async def _chat(cluster: ScriptedCluster, text: str, **fields: object) -> dict[str, Any]:
    cluster.script.replies = [[*tokens_of(text), END]]
    body = {"model": NAME, "messages": [{"role": "user", "content": "Hi"}]} | fields
    status, answer = await cluster.post("/v1/chat/completions", body)
    assert status == 200, answer
    return answer


async def _streamed(cluster: ScriptedCluster, text: str, **fields: object) -> tuple[dict[str, Any], dict[str, Any]]:
    """The message and the last event but one of a stream."""
    cluster.script.replies = [[*tokens_of(text), END]]
    body = {"model": NAME, "messages": [{"role": "user", "content": "Hi"}], "stream": True} | fields
    body["stream_options"] = {"include_usage": True}
    async with cluster.http.post(f"{cluster.base_url}/v1/chat/completions", json=body) as response:
        lines = [line.decode() async for line in response.content if line.startswith(b"data: {")]
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    message: dict[str, Any] = {"content": "", "reasoning": "", "calls": {}}
    for delta in (choice["delta"] for event in events for choice in event["choices"]):
        assert delta.get("reasoning") == delta.get("reasoning_content")
        message["content"] += delta.get("content", "")
        message["reasoning"] += delta.get("reasoning", "")
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                message["calls"][call["index"]] = [call["function"]["name"], ""]
            message["calls"][call["index"]][1] += call["function"]["arguments"]
    return message, events[-1]["usage"]


async def test_thinking_has_both_names_and_is_counted_in_tokens(thinker: ScriptedCluster) -> None:
    """Clients know one name or the other: vllm#50624, open-webui#23260."""
    answer = await _chat(thinker, _THOUGHT + "Hello.")
    message = answer["choices"][0]["message"]
    assert message == {
        "role": "assistant",
        "content": "Hello.",
        "refusal": None,
        "reasoning": "Hm.",
        "reasoning_content": "Hm.",
    }
    # Every byte is a token here, and it is thinking from the last one of the opening on.
    thought = len(">\nHm.\n</think>")
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": thought}
    streamed, usage = await _streamed(thinker, _THOUGHT + "Hello.")
    assert streamed == {"content": "Hello.", "reasoning": "Hm.", "calls": {}}
    assert usage["completion_tokens_details"] == {"reasoning_tokens": thought}


async def test_thinking_that_the_prompt_has_opened_needs_no_opening(thinker: ScriptedCluster) -> None:
    """The output has the closing tag alone: vllm#22507."""
    opened = {"chat_template_kwargs": {"opens": True}}
    message = (await _chat(thinker, "Hm.\n</think>\n\nHello.", **opened))["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("Hm.", "Hello.")
    cut = (await _chat(thinker, "Hm.", **opened))["choices"][0]["message"]
    assert (cut["reasoning"], cut["content"]) == ("Hm.", None)


@pytest.mark.parametrize("off", [{"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False}}])
async def test_thinking_can_be_turned_off(thinker: ScriptedCluster, off: dict[str, Any]) -> None:
    message = (await _chat(thinker, "Hello.", **off))["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "Hello.", "refusal": None}
    tokens = bytes(token for token in thinker.calls.decode_starts[-1].prompt_token_ids if token < 256)
    assert tokens.endswith(b"<think>\n\n</think>\n\n")


async def test_thinking_may_be_left_out_and_comes_back_under_either_name(thinker: ScriptedCluster) -> None:
    message = (await _chat(thinker, _THOUGHT + "Hello.", include_reasoning=False))["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "Hello.", "refusal": None}
    for name in ("reasoning", "reasoning_content"):
        messages = [{"role": "assistant", "content": "A", name: "thought before"}, {"role": "user", "content": "B"}]
        await _chat(thinker, "Hello.", messages=messages)
        tokens = thinker.calls.decode_starts[-1].prompt_token_ids
        assert b"thought before" in bytes(token for token in tokens if token < 256)


@pytest.mark.parametrize(
    ("choice", "reason"), [("auto", "tool_calls"), ({"type": "function", "function": {"name": "put"}}, "stop")]
)
async def test_calls_behind_thinking(thinker: ScriptedCluster, choice: object, reason: str) -> None:
    """The reason is `tool_calls` only with calls, and `stop` for a function that the client names: vllm#25054."""
    fields = {"tools": _TOOLS, "tool_choice": choice}
    answer = await _chat(thinker, _THOUGHT + _CALL, **fields)
    [choice_of_answer] = answer["choices"]
    [call] = choice_of_answer["message"].pop("tool_calls")
    assert call["function"] == {"name": "put", "arguments": '{"a": 1}'}
    assert choice_of_answer["message"]["content"] is None
    assert choice_of_answer["message"]["reasoning"] == "Hm."
    assert choice_of_answer["finish_reason"] == reason
    streamed, _ = await _streamed(thinker, _THOUGHT + _CALL, **fields)
    assert streamed == {"content": "", "reasoning": "Hm.", "calls": {0: ["put", '{"a": 1}']}}


async def test_two_calls_of_one_answer_have_indices_and_ids_of_their_own(thinker: ScriptedCluster) -> None:
    text = _CALL + "\n" + _CALL.replace("1", "2")
    [choice] = (await _chat(thinker, text, tools=_TOOLS))["choices"]
    calls = choice["message"]["tool_calls"]
    assert [json.loads(call["function"]["arguments"]) for call in calls] == [{"a": 1}, {"a": 2}]
    assert len({call["id"] for call in calls}) == 2
    assert choice["finish_reason"] == "tool_calls"
    streamed, _ = await _streamed(thinker, text, tools=_TOOLS)
    assert streamed["calls"] == {0: ["put", '{"a": 1}'], 1: ["put", '{"a": 2}']}


async def test_a_call_that_max_tokens_cuts_is_not_repaired(thinker: ScriptedCluster) -> None:
    cut = {"tools": _TOOLS, "max_tokens": _CALL.index("1")}
    [choice] = (await _chat(thinker, _CALL, **cut))["choices"]
    assert [call["function"]["arguments"] for call in choice["message"]["tool_calls"]] == ['{"a": ']
    assert choice["finish_reason"] == "length"
    streamed, _ = await _streamed(thinker, _CALL, **cut)
    assert streamed["calls"] == {0: ["put", '{"a": ']}


async def test_without_calls_the_reason_is_stop_and_without_tools_nothing_is_a_call(thinker: ScriptedCluster) -> None:
    """An empty list of calls with the reason `tool_calls`: vllm#53255."""
    [choice] = (await _chat(thinker, "Hello.", tools=_TOOLS))["choices"]
    assert choice["finish_reason"] == "stop"
    assert "tool_calls" not in choice["message"]
    assert (await _chat(thinker, _CALL))["choices"][0]["message"]["content"] == _CALL


async def test_workers_get_one_grammar_of_thinking_and_structured_output(thinker: ScriptedCluster) -> None:
    """Nothing has to switch the grammar on behind the thinking: vllm#44012, #50938."""
    await _chat(thinker, _THOUGHT + "{}", response_format={"type": "json_object"})
    grammar = thinker.calls.decode_starts[-1].sampling.grammar
    assert "</think>" in grammar
    assert "json_schema" in grammar
    await _chat(thinker, "{}", response_format={"type": "json_object"}, reasoning_effort="none")
    assert "</think>" not in thinker.calls.decode_starts[-1].sampling.grammar
    await _chat(thinker, "Hello.")
    assert not thinker.calls.decode_starts[-1].sampling.grammar


async def test_calls_cannot_be_required_of_messages_that_are_plain_text(
    redis_server: PrivateRedis, tmp_path: Path
) -> None:
    directory = write_model(tmp_path / NAME)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    config = {"message_format": "none"}
    async with in_own_task(open_cluster(redis_server, directory, ONE_OF_EACH, **config)) as plain:
        body = {"model": NAME, "messages": [{"role": "user", "content": "Hi"}], "tools": _TOOLS}
        status, answer = await plain.post("/v1/chat/completions", body | {"tool_choice": "required"})
        assert (status, answer["error"]["param"]) == (400, "tool_choice")
        assert "--message-format none" in answer["error"]["message"]
        assert (await _chat(plain, _CALL, tools=_TOOLS))["choices"][0]["message"]["content"] == _CALL


async def test_messages_that_are_plain_text_are_held_to_a_schema_alone(
    redis_server: PrivateRedis, tmp_path: Path
) -> None:
    directory = write_model(tmp_path / NAME)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    text = '{"city": "<think>"}'
    named = {"name": "a", "schema": {"type": "object", "properties": {"city": {"type": "string"}}}}
    async with in_own_task(open_cluster(redis_server, directory, ONE_OF_EACH, message_format="none")) as plain:
        answer = await _chat(plain, text, response_format={"type": "json_schema", "json_schema": named})
        assert answer["choices"][0]["message"] == {"role": "assistant", "content": text, "refusal": None}
        grammar = plain.calls.decode_starts[-1].sampling.grammar
        assert "city" in grammar
        assert "think" not in grammar


async def test_a_message_goes_on(thinker: ScriptedCluster) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "<think>\nHm"}]
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    message = (await _chat(thinker, ".</think>Hello.", messages=messages, **fields))["choices"][0]["message"]
    tokens = bytes(token for token in thinker.calls.decode_starts[-1].prompt_token_ids if token < 256)
    assert tokens.endswith(b"<think>\nHm")
    assert (message["reasoning"], message["content"]) == (".", "Hello.")


async def test_stop_strings_end_a_message_anywhere(thinker: ScriptedCluster) -> None:
    message = (await _chat(thinker, _THOUGHT + "Hello.", stop=["llo"]))["choices"][0]
    assert (message["message"]["content"], message["stop_reason"]) == ("He", "llo")


async def test_documents_reach_a_template_that_shows_them(redis_server: PrivateRedis, tmp_path: Path) -> None:
    directory = write_model(tmp_path / NAME)
    shown = "{% for document in documents or [] %}[{{ document.title }}: {{ document.text }}]{% endfor %}"
    (directory / "chat_template.jinja").write_text(shown + TEMPLATE)
    documents = [{"title": "A", "text": "one"}, {"title": "B", "text": "two"}]
    async with in_own_task(open_cluster(redis_server, directory, ONE_OF_EACH)) as cluster:
        await _chat(cluster, "Hello.", documents=documents)
        prompt = bytes(token for token in cluster.calls.decode_starts[-1].prompt_token_ids if token < 256).decode()
        assert prompt.startswith("[A: one][B: two]")


async def test_a_template_that_shows_no_documents_refuses_them(thinker: ScriptedCluster) -> None:
    body = {"model": NAME, "messages": [{"role": "user", "content": "Hi"}], "documents": [{"text": "one"}]}
    status, answer = await thinker.post("/v1/chat/completions", body)
    assert (status, answer["error"]["param"]) == (400, "documents")
    assert (await thinker.post("/tokenize", body | {"documents": []}))[0] == 200
