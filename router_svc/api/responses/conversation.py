"""From the items of a request to the messages of a chat, as templates know them."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

from router_svc.api.responses.items import (
    CallOutputItem,
    CustomToolCallItem,
    FunctionCallItem,
    Item,
    MessageItem,
    OtherItem,
    ReasoningItem,
)
from router_svc.api.responses.tools import INPUT, name_for_model

#: How thinking starts that this server has encoded. It is no secret: the client has the text, too.
_ENCODED = "pdserve1."
#: Characters of encoded thinking that are read.
_MAX_ENCODED = 4 * 1024**2

Message = dict[str, Any]


def encode_thinking(text: str) -> str:
    """Thinking in a form that clients keep and send back, where they keep nothing else of it."""
    return _ENCODED + base64.b64encode(text.encode(errors="replace")).decode()


def decode_thinking(encoded: str) -> str:
    """The thinking of `encode_thinking`; empty: it is not from this server, or damaged."""
    if not encoded.startswith(_ENCODED) or len(encoded) > _MAX_ENCODED:
        return ""
    try:
        return base64.b64decode(encoded.removeprefix(_ENCODED), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""


def chat_messages(instructions: str | None, items: Sequence[Item]) -> list[Message]:
    """The messages of a conversation.

    What system and developer say at its start is one message with the instructions, since most templates take a single
    one there. The thinking, text and calls of one turn of the assistant are one message, as it was generated.
    """
    first = [instructions] if instructions else []
    leading = [item.content for item in takewhile(_is_of_system, items) if isinstance(item, MessageItem)]
    first += leading
    messages: list[Message] = [{"role": "system", "content": "\n\n".join(first)}] if first else []
    for item in items[len(leading) :]:
        _add(messages, item)
    return messages


def _is_of_system(item: Item) -> bool:
    return isinstance(item, MessageItem) and item.role in ("system", "developer")


def left_out(items: Sequence[Item]) -> list[str]:
    """The types of items that are left out."""
    return [item.type for item in items if isinstance(item, OtherItem)]


def _add(messages: list[Message], item: Item) -> None:
    match item:
        case MessageItem(role="assistant"):
            _turn(messages, takes=_has_only_thinking)["content"] = item.content
        case MessageItem():
            role = "user" if item.role == "user" else "system"
            messages.append({"role": role, "content": item.content})
        case ReasoningItem():
            thinking = item.content or item.summary or decode_thinking(item.encrypted_content or "")
            if thinking:
                _turn(messages, takes=lambda last: False)["reasoning"] = thinking
        case FunctionCallItem():
            _add_call(messages, item, item.arguments)
        case CustomToolCallItem():
            _add_call(messages, item, json.dumps({INPUT: item.input}, ensure_ascii=False))
        case CallOutputItem():
            messages.append({"role": "tool", "content": item.output, "tool_call_id": item.call_id})


def _add_call(messages: list[Message], item: FunctionCallItem | CustomToolCallItem, arguments: str) -> None:
    function = {"name": name_for_model(item.name, item.namespace, param="input"), "arguments": arguments}
    call = {"id": item.call_id, "type": "function", "function": function}
    _turn(messages, takes=lambda last: True).setdefault("tool_calls", []).append(call)


def _has_only_thinking(message: Message) -> bool:
    return message["content"] is None and "tool_calls" not in message


def _turn(messages: list[Message], takes: Callable[[Message], bool]) -> Message:
    """The message of the assistant that goes on: the last one if it takes more, else a new one."""
    if messages and messages[-1]["role"] == "assistant" and takes(messages[-1]):
        return messages[-1]
    messages.append({"role": "assistant", "content": None})
    return messages[-1]
