"""/v1/responses with the official client: items in, items out, whatever happens on the way."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from pydantic import BaseModel

from pdserve.base.errors import RequestError
from tests.integration.router_svc.conftest import ScriptedCluster
from tests.integration.router_svc.script import Context, failing
from tests.support.lazily import openai
from tests.support.tiny_model import END, NAME, tokens_of

_PUT = {"type": "function", "name": "put", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
_PATCH = {"type": "custom", "name": "patch", "description": "Edits files."}
_UNENFORCEABLE = {"type": "object", "properties": {"a": {"not": {}}}}
_STRICT = {"type": "function", "name": "get", "strict": True, "parameters": _UNENFORCEABLE}
_NESTED = {"type": "namespace", "name": "files", "tools": [_STRICT]}
_TOOLS: list[Any] = [_PUT, _PATCH]
_THOUGHT = "<think>\nHm.\n</think>\n\n"
_CALL = '<tool_call>\n{"name": "put", "arguments": {"a": 1}}\n</tool_call>'
_CUSTOM = '<tool_call>\n{"name": "patch", "arguments": {"input": "- a\\n+ b"}}\n</tool_call>'


def _reply(cluster: ScriptedCluster, reply: str) -> None:
    cluster.script.replies = [[*tokens_of(reply), END]]


async def _create(cluster: ScriptedCluster, reply: str, **fields: Any) -> Any:
    _reply(cluster, reply)
    async with cluster.client() as client:
        return await client.responses.create(model=NAME, **({"input": "Hi"} | fields))


async def _streamed(cluster: ScriptedCluster, reply: str, **fields: Any) -> tuple[list[Any], Any]:
    """The events, and the response that the official client has put together from them."""
    _reply(cluster, reply)
    fields = {"input": "Hi"} | fields
    async with cluster.client() as client, client.responses.stream(model=NAME, **fields) as stream:
        events = [event async for event in stream]
        return events, await stream.get_final_response()


async def test_thinking_text_and_calls_are_items(thinker: ScriptedCluster) -> None:
    fields = {"tools": _TOOLS, "metadata": {"a": "b"}, "instructions": "Be brief.", "temperature": 0.5}
    whole = await _create(thinker, _THOUGHT + "Hello." + _CALL + _CUSTOM, **fields)
    thinking, message, call, custom = whole.output
    assert (thinking.type, thinking.content[0].text) == ("reasoning", "Hm.")
    assert (message.type, whole.output_text) == ("message", "Hello.")
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "put", {"a": 1})
    assert (custom.type, custom.name, custom.input) == ("custom_tool_call", "patch", "- a\n+ b")
    assert (whole.status, whole.metadata, whole.instructions, whole.temperature) == (
        "completed",
        {"a": "b"},
        "Be brief.",
        0.5,
    )
    assert whole.usage.output_tokens_details.reasoning_tokens > 0
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
    events, final = await _streamed(thinker, _THOUGHT + "Hello." + _CALL + _CUSTOM, **fields)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [item.type for item in final.output] == [item.type for item in whole.output]
    assert (final.output_text, final.output[3].input) == (whole.output_text, custom.input)
    assert final.output[2].arguments == call.arguments


async def test_a_conversation_goes_on_with_the_items_of_a_response(thinker: ScriptedCluster) -> None:
    include: Any = ["reasoning.encrypted_content"]
    first = await _create(thinker, _THOUGHT + _CALL, tools=_TOOLS, include=include)
    items: list[Any] = [{"role": "user", "content": "Hi"}]
    items += [item.model_dump(exclude_none=True) for item in first.output]
    items.append({"type": "function_call_output", "call_id": first.output[1].call_id, "output": "done"})
    await _create(thinker, "Good.", tools=_TOOLS, input=items)
    prompt = bytes(token for token in thinker.calls.decode_starts[-1].prompt_token_ids if token < 256).decode()
    assert "Hm." in prompt
    assert "done" in prompt


async def test_what_agents_send_and_this_server_lacks_is_named_in_a_header(thinker: ScriptedCluster) -> None:
    """vllm#56285: the agent's tools and beta fields. A strict server cannot be used by it."""
    _reply(thinker, "Hello.")
    body = {
        "model": NAME,
        "input": [{"role": "user", "content": "Hi"}, {"type": "web_search_call", "id": "ws_1"}],
        "tools": [{"type": "web_search"}, _PUT],
        "client_metadata": {"session": "1"},
        "store": False,
    }
    async with thinker.http.post(f"{thinker.base_url}/v1/responses", json=body) as response:
        assert response.status == 200, await response.text()
        named = response.headers["Pdserve-Ignored-Fields"]
    assert named == "client_metadata, tools[].web_search, input[].web_search_call"


_WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"max_output_tokens": 10**6}, "max_output_tokens", "max_output_tokens"),
    ({"text": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "text.format.schema.not", "not"),
    ({"reasoning": {"effort": "much"}}, "reasoning.effort", "got 'much'"),
    ({"tools": [_PUT, _PUT]}, "tools", "same name"),
    ({"tools": [_PUT, {"type": "function"}]}, "tools[1].name", "required"),
    ({"tools": [{"type": "web_search"}, _NESTED]}, "tools[1].tools[0].parameters.properties.a.not", "be enforced"),
    ({"tool_choice": "some", "tools": [_PUT]}, "tool_choice", "got 'some'"),
    ({"tool_choice": {"type": "mcp"}, "tools": [_PUT]}, "tool_choice", "got 'mcp'"),
    ({"tool_choice": {"type": "custom"}, "tools": [_PUT]}, "tool_choice.name", "required"),
    ({"input": [{"role": "user"}]}, "input[0].content", "required"),
    ({"tool_choice": {"type": "function", "name": "x"}, "tools": [_PUT]}, "tool_choice", "`x`"),
    ({"previous_response_id": "resp_1"}, "previous_response_id", "stores no responses"),
    ({"input": "x" * 100_000}, "input", "tokens"),
    ({"model": "other"}, "model", "does not exist"),
]


async def test_an_error_names_the_field_of_this_endpoint(thinker: ScriptedCluster) -> None:
    for fields, param, text in _WRONG:
        status, answer = await thinker.post("/v1/responses", {"model": NAME, "input": "Hi"} | fields)
        assert status in (400, 404)
        assert answer["error"]["param"] == param
        assert text in answer["error"]["message"]
        assert "messages" not in answer["error"]["message"]


async def test_a_response_that_was_cut_is_incomplete(thinker: ScriptedCluster) -> None:
    whole = await _create(thinker, "Hello, world.", max_output_tokens=5)
    assert (whole.status, whole.incomplete_details.reason, whole.output_text) == (
        "incomplete",
        "max_output_tokens",
        "Hello",
    )


async def test_log_probabilities_come_with_the_text(thinker: ScriptedCluster) -> None:
    include: Any = ["message.output_text.logprobs"]
    _, final = await _streamed(thinker, _THOUGHT + "Hi", include=include, top_logprobs=2)
    text = final.output[1].content[0]
    assert [len(entry.top_logprobs) for entry in text.logprobs] == [2, 2]
    assert "".join(entry.token for entry in text.logprobs) == "Hi"


async def test_a_choice_of_tools_reaches_the_workers_as_a_grammar(thinker: ScriptedCluster) -> None:
    await _create(thinker, _CUSTOM, tools=_TOOLS, tool_choice={"type": "custom", "name": "patch"})
    assert "patch" in thinker.calls.decode_starts[-1].sampling.grammar
    schema = {
        "type": "json_schema",
        "name": "n",
        "schema": {"type": "object", "properties": {"city": {"type": "string"}}},
    }
    await _create(thinker, "{}", text={"format": schema})
    assert "city" in thinker.calls.decode_starts[-1].sampling.grammar


class _City(BaseModel):
    city: str


async def test_json_behind_thinking_is_parsed_and_both_are_one_grammar(thinker: ScriptedCluster) -> None:
    _reply(thinker, _THOUGHT + '{"city": "Ulm"}')
    async with thinker.client() as client:
        whole = await client.responses.parse(model=NAME, input="Hi", text_format=_City)
    assert [item.type for item in whole.output] == ["reasoning", "message"]
    assert whole.output_parsed == _City(city="Ulm")
    grammar = thinker.calls.decode_starts[-1].sampling.grammar
    assert "</think>" in grammar
    assert "city" in grammar
    _, final = await _streamed(thinker, _THOUGHT + '{"city": "Ulm"}', text_format=_City)
    assert final.output_parsed == whole.output_parsed


async def test_a_stream_that_fails_has_one_last_event(thinker: ScriptedCluster) -> None:
    """An error that any other worker has, too: two, without a token in between, are enough."""
    has_text = asyncio.Event()

    async def fail(context: Context) -> None:
        await has_text.wait()
        await failing(RequestError("no worker can do this"))(context)

    thinker.script.fail("decode_token", None, None, fail, fail)
    _reply(thinker, "Hello, world.")
    lines = []
    body = {"model": NAME, "input": "Hi", "stream": True}
    async with thinker.http.post(f"{thinker.base_url}/v1/responses", json=body) as response:
        async for line in response.content:
            if line.startswith(b"data: "):
                lines.append(line.decode().strip())
                if "output_text.delta" in lines[-1]:
                    has_text.set()
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    ends = [event for event in events if event["type"] in ("response.failed", "response.completed", "error")]
    assert [event["type"] for event in ends] == ["response.failed"]
    assert "no worker can do this" in events[-1]["response"]["error"]["message"]
    assert events[-1]["response"]["output"][-1]["status"] == "incomplete"


async def test_the_client_raises_the_error_of_a_wrong_request(thinker: ScriptedCluster) -> None:
    with pytest.raises(openai.BadRequestError, match="max_output_tokens"):
        await _create(thinker, "", max_output_tokens=0)


async def test_without_a_store_no_item_is_referred_to(thinker: ScriptedCluster) -> None:
    sent = [{"role": "user", "content": "Hi"}, {"type": "item_reference", "id": "msg_1-o0"}]
    status, answer = await thinker.post("/v1/responses", {"model": NAME, "input": sent})
    assert (status, answer["error"]["param"]) == (400, "input")
    assert (
        "`input[1]` refers to an item of a stored response, and this server stores none" in answer["error"]["message"]
    )


async def test_an_input_of_items_that_are_left_out_is_refused_as_that(thinker: ScriptedCluster) -> None:
    for fields in ({}, {"instructions": ""}):
        with pytest.raises(openai.BadRequestError, match="only items that this server leaves out") as raised:
            await _create(thinker, "", input=[{"type": "web_search_call", "id": "1"}], **fields)
        assert raised.value.param == "input"
