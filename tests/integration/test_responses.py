"""/v1/responses of a real cluster, with the official client: what a chat would say, and calls that fit their schema."""

from __future__ import annotations

import json
from typing import Any

import jsonschema

from tests.integration.test_tools import SCHEMAS, TOOLS, USER
from tests.support.cluster import MODEL, Cluster

_TOOLS: list[Any] = [{"type": "function", **tool["function"]} for tool in TOOLS]


def test_a_response_says_what_a_chat_says(cluster: Cluster) -> None:
    """Sampled, so that equal texts mean equal prompts, seeds and settings."""
    fields: dict[str, Any] = {"model": MODEL, "temperature": 0.9, "extra_body": {"seed": 7}}
    with cluster.client() as client:
        chat = client.chat.completions.create(
            **fields, max_tokens=24, messages=[{"role": "system", "content": "Be brief."}, USER]
        )
        whole = client.responses.create(**fields, max_output_tokens=24, instructions="Be brief.", input=[USER])
        with client.responses.stream(**fields, max_output_tokens=24, instructions="Be brief.", input=[USER]) as stream:
            events = list(stream)
    last = events[-1]
    # 24 tokens are hardly the whole answer.
    assert last.type in ("response.incomplete", "response.completed")
    deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert whole.output_text == last.response.output_text == deltas == chat.choices[0].message.content
    assert whole.usage is not None
    assert chat.usage is not None
    assert whole.usage.input_tokens == chat.usage.prompt_tokens
    assert whole.usage.output_tokens == chat.usage.completion_tokens


def test_a_required_call_fits_its_schema_and_can_be_answered(cluster: Cluster) -> None:
    fields: dict[str, Any] = {"model": MODEL, "tools": _TOOLS, "temperature": 0, "max_output_tokens": 120}
    with cluster.client() as client:
        first = client.responses.create(**fields, input=[USER], tool_choice="required", parallel_tool_calls=False)
        [call] = first.output
        assert call.type == "function_call"
        jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "20 degrees"}
        items: list[Any] = [USER, call.model_dump(exclude_none=True), output]
        again = client.responses.create(**fields, input=items, tool_choice="none")
    assert again.status in ("completed", "incomplete")
    assert [item.type for item in again.output] == ["message"]
