"""Tools for models whose chat template knows none: they are described in the system message, and calls are text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

_INSTRUCTIONS = """You can call functions. These are their signatures:
<tools>
{tools}
</tools>
To call a function, write a JSON object with its name and arguments within <tool_call> tags:
<tool_call>
{{"name": <name>, "arguments": <arguments>}}
</tool_call>"""


def text_of_content(content: Any) -> str:
    """The text of a message's content, which may have parts."""
    return "\n".join(each["text"] for each in content) if isinstance(content, list) else str(content or "")


def with_described_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """The conversation in which nothing but texts of the system, the user and the assistant is left."""
    described: list[Mapping[str, Any]] = []
    for is_result, run in groupby(messages, lambda message: message["role"] == "tool"):
        several = list(run)
        # Results of several calls are one message: templates may demand that users and assistants take turns.
        described += [_of_results(several)] if is_result else map(_without_calls, several)
    if not tools:
        return described
    text = _INSTRUCTIONS.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if described and described[0]["role"] in ("system", "developer"):
        first = described[0]
        return [{**first, "content": f"{text_of_content(first['content'])}\n\n{text}"}, *described[1:]]
    return [{"role": "system", "content": text}, *described]


def _of_results(messages: Iterable[Mapping[str, Any]]) -> Mapping[str, Any]:
    results = (f"<tool_response>\n{text_of_content(message['content'])}\n</tool_response>" for message in messages)
    return {"role": "user", "content": "\n".join(results)}


def _without_calls(message: Mapping[str, Any]) -> Mapping[str, Any]:
    calls = [f"<tool_call>\n{json.dumps(_call(each), ensure_ascii=False)}\n</tool_call>" for each in _calls(message)]
    if not calls:
        return message
    kept = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**kept, "content": "\n".join(filter(None, (text_of_content(message["content"]), *calls)))}


def _calls(message: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    calls: Sequence[Mapping[str, Any]] = message.get("tool_calls") or ()
    return calls


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {"name": function["name"], "arguments": function["arguments"]}
