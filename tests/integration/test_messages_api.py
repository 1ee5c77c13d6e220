"""/v1/messages of a real cluster, with Anthropic's client: what a chat would say, and calls that fit their schema."""

from __future__ import annotations

from typing import Any

import jsonschema

from tests.integration.test_tools import SCHEMAS, TOOLS, USER
from tests.support.cluster import MODEL, Cluster

_TOOLS: list[Any] = [
    {"input_schema": tool["function"]["parameters"]}
    | {name: value for name, value in tool["function"].items() if name != "parameters"}
    for tool in TOOLS
]


async def test_a_message_says_what_a_chat_says(cluster: Cluster) -> None:
    """Sampled, so that equal texts mean equal prompts, seeds and settings."""
    sampled: dict[str, Any] = {"max_tokens": 24, "extra_body": {"seed": 7, "temperature": 0.9}}
    message: dict[str, Any] = {"model": MODEL, "messages": [USER], "system": "Be brief."}
    async with cluster.async_client() as openai, cluster.anthropic_client() as client:
        system = {"role": "system", "content": "Be brief."}
        chat = await openai.chat.completions.create(**sampled, model=MODEL, messages=[system, USER])
        whole = await client.messages.create(**sampled | message)
        async with client.messages.stream(**sampled | message) as stream:
            text = "".join([piece async for piece in stream.text_stream])
            streamed = await stream.get_final_message()
        counted = await client.messages.count_tokens(**message)
    assert chat.usage is not None
    for message_of in (whole, streamed):
        assert [block.text for block in message_of.content if block.type == "text"] == [text]
    assert text == chat.choices[0].message.content
    for usage in (whole.usage, streamed.usage):
        assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == chat.usage.prompt_tokens
        assert usage.output_tokens == chat.usage.completion_tokens
    # The prompt of the stream is that of two requests before it.
    assert streamed.usage.cache_read_input_tokens
    assert counted.input_tokens == chat.usage.prompt_tokens


async def test_a_required_call_fits_its_schema_and_can_be_answered(cluster: Cluster) -> None:
    fields: dict[str, Any] = {"model": MODEL, "tools": _TOOLS, "max_tokens": 120, "extra_body": {"temperature": 0}}
    required = {"type": "any", "disable_parallel_tool_use": True}
    async with cluster.anthropic_client() as client:
        first = await client.messages.create(**fields, messages=[USER], tool_choice=required)
        [call] = first.content
        assert call.type == "tool_use"
        jsonschema.validate(call.input, SCHEMAS[call.name])
        assert first.stop_reason == "tool_use"
        result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "20 degrees"}
        conversation: list[Any] = [USER, first.to_param(), {"role": "user", "content": [result]}]
        again = await client.messages.create(
            **fields | {"max_tokens": 10}, messages=conversation, tool_choice={"type": "none"}
        )
    assert [block.type for block in again.content] == ["text"]
    assert again.stop_reason in ("end_turn", "max_tokens")
