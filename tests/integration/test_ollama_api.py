"""Ollama's API of a real cluster, with Ollama's client: what a chat would say, and calls that fit their schema."""

from __future__ import annotations

import json
from typing import Any

import jsonschema

from tests.integration.test_tools import USER, WEATHER
from tests.support.cluster import MODEL, Cluster


async def test_a_chat_and_a_raw_prompt_say_what_they_say_elsewhere(cluster: Cluster) -> None:
    """Sampled, so that equal texts mean equal prompts, seeds and settings."""
    options: Any = {"seed": 7, "temperature": 0.9, "num_predict": 12}
    sampled: dict[str, Any] = {"model": MODEL, "seed": 7, "temperature": 0.9, "max_tokens": 12}
    messages: Any = [{"role": "system", "content": "Be brief."}, USER]
    async with cluster.async_client() as openai, cluster.ollama_client() as client:
        chat = await openai.chat.completions.create(**sampled, messages=messages)
        raw = await openai.completions.create(**sampled, prompt=USER["content"])
        whole = await client.chat(MODEL, messages, options=options)
        pieces = [piece async for piece in await client.chat(MODEL, messages, options=options, stream=True)]
        generated = await client.generate(MODEL, USER["content"], system="Be brief.", options=options)
        completed = await client.generate(MODEL, USER["content"], raw=True, options=options)
        [listed], shown = (await client.list()).models, await client.show(MODEL)
        [running] = (await client.ps()).models
    text = chat.choices[0].message.content
    assert text
    assert whole.message.content == generated.response == text
    assert "".join(piece.message.content or "" for piece in pieces) == text
    assert completed.response == raw.choices[0].text
    assert chat.usage is not None
    for answer in (whole, pieces[-1], generated):
        assert (answer.prompt_eval_count, answer.eval_count) == (
            chat.usage.prompt_tokens,
            chat.usage.completion_tokens,
        )
        assert answer.done_reason == chat.choices[0].finish_reason
    assert listed.model == running.model == MODEL
    assert listed.digest == running.digest
    assert listed.size
    assert listed.details == shown.details


async def test_calls_and_formats_fit_their_schemas(cluster: Cluster) -> None:
    fields: dict[str, Any] = {"model": MODEL, "messages": [USER], "options": {"temperature": 0, "num_predict": 40}}
    chat: dict[str, Any] = {"model": MODEL, "messages": [USER], "max_tokens": 40, "temperature": 0}
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER}}
    async with cluster.async_client() as openai, cluster.ollama_client() as client:
        formed = await client.chat(**fields, format=WEATHER)
        same = await openai.chat.completions.create(**chat, response_format=form)
        # Of one tool whose schema Ollama's client passes on as it is, so that both get the same prompt.
        simple = {"type": "object", "properties": {"zone": {"type": "integer"}}, "required": ["zone"]}
        function = {"name": "get_time", "description": "The time", "parameters": simple}
        tool: Any = {"type": "function", "function": function}
        few: Any = {"options": {"temperature": 0, "num_predict": 12}}
        called = await client.chat(**fields | few, tools=[tool])
        expected = (await openai.chat.completions.create(**chat | {"max_tokens": 12}, tools=[tool])).choices[0].message
    assert formed.message.content == same.choices[0].message.content
    jsonschema.validate(json.loads(formed.message.content or ""), WEATHER)
    assert (called.message.content or "") == (expected.content or "")
    assert [(call.function.name, call.function.arguments) for call in called.message.tool_calls or ()] == [
        (call.function.name, json.loads(call.function.arguments))
        for call in expected.tool_calls or ()
        if call.type == "function"
    ]
