"""Messages of a conversation as `pdserve chat` keeps them and the API takes them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class ToolCall:
    """A call of a tool while it arrives."""

    id: str = ""
    name: str = ""
    arguments: str = ""

    @property
    def is_complete(self) -> bool:
        """Whether its arguments are an object. They are not where the answer was cut within them."""
        try:
            return bool(self.name) and isinstance(json.loads(self.arguments), dict)
        except ValueError:
            return False

    def to_json(self) -> dict[str, object]:
        """The call as a message has it."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One message of the conversation. `calls`: those that are followed by their results, messages of role `tool`."""

    role: str
    content: str
    thinking: str = ""
    calls: Sequence[ToolCall] = ()
    tool_call_id: str = ""

    def to_json(self) -> dict[str, object]:
        """The message as the API takes it. Templates decide whether a model sees its earlier thinking."""
        optional: dict[str, object] = {
            "reasoning": self.thinking,
            "tool_calls": [call.to_json() for call in self.calls],
            "tool_call_id": self.tool_call_id,
        }
        return {"role": self.role, "content": self.content} | {name: value for name, value in optional.items() if value}
