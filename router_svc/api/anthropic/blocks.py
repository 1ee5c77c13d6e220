"""The messages of a conversation in the request, and the blocks that they consist of."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from annotated_types import MaxLen, MinLen
from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from router_svc.api.body import MAX_NAME_CHARACTERS
from router_svc.api.lenient import LenientModel, by_field, tagged
from router_svc.api.openai.messages import MAX_MESSAGES
from router_svc.api.openai.tools import ToolName

_TEXT_ONLY = "models here read text, so images, documents and other kinds are not supported"
#: Blocks are cached by their tokens, without a mark.
_CacheControl = Annotated[Any, Field(description="Accepted without effect: every prefix is cached.")]
_BlockId = Annotated[str, MaxLen(MAX_NAME_CHARACTERS)]


class TextBlock(LenientModel):
    """Text."""

    type: Literal["text"]
    text: str
    cache_control: _CacheControl = None
    citations: Any = None


class ThinkingBlock(LenientModel):
    """The thinking of an earlier answer. Its signature may be missing, or of another server."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(LenientModel):
    """Thinking that only the server that made it can read."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(LenientModel):
    """A call of an earlier answer."""

    type: Literal["tool_use"]
    id: _BlockId
    name: ToolName
    input: Annotated[dict[str, Any], Field(description="The arguments of the call.")]
    cache_control: _CacheControl = None
    caller: Any = None


def _as_blocks(value: object) -> object:
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list):
        raise PydanticCustomError("content", "must be a string or a list of blocks")
    return value


def _text_only(value: object) -> object:
    if isinstance(value, dict) and value.get("type") != "text":
        raise PydanticCustomError("type", f"must be a block of the type text: {_TEXT_ONLY}")
    return value


_OnlyText = Annotated[TextBlock, BeforeValidator(_text_only)]
TextBlocks = Annotated[
    list[_OnlyText], Field(fail_fast=True), BeforeValidator(_as_blocks, json_schema_input_type=str | list[_OnlyText])
]


class ToolResultBlock(LenientModel):
    """What a tool has answered."""

    type: Literal["tool_result"]
    tool_use_id: _BlockId
    content: TextBlocks | None = None
    is_error: bool | None = None
    cache_control: _CacheControl = None


_UserBlock = Annotated[
    Annotated[TextBlock, tagged("text")] | Annotated[ToolResultBlock, tagged("tool_result")],
    by_field("type", f"must be a block of the type text or tool_result: {_TEXT_ONLY}"),
]
_AssistantBlock = Annotated[
    Annotated[TextBlock, tagged("text")]
    | Annotated[ThinkingBlock, tagged("thinking")]
    | Annotated[RedactedThinkingBlock, tagged("redacted_thinking")]
    | Annotated[ToolUseBlock, tagged("tool_use")],
    by_field("type", "must be a block of the type text, thinking, redacted_thinking or tool_use"),
]


class UserMessage(LenientModel):
    """What the user says, and results of tools."""

    role: Literal["user"]
    content: Annotated[
        list[_UserBlock],
        Field(fail_fast=True),
        BeforeValidator(_as_blocks, json_schema_input_type=str | list[_UserBlock]),
    ]


class AssistantMessage(LenientModel):
    """An earlier answer, or the start of the next one."""

    role: Literal["assistant"]
    content: Annotated[
        list[_AssistantBlock],
        Field(fail_fast=True),
        BeforeValidator(_as_blocks, json_schema_input_type=str | list[_AssistantBlock]),
    ]


class SystemMessage(LenientModel):
    """Instructions within the conversation."""

    role: Literal["system"]
    content: TextBlocks


Message = Annotated[
    Annotated[UserMessage, tagged("user")]
    | Annotated[AssistantMessage, tagged("assistant")]
    | Annotated[SystemMessage, tagged("system")],
    by_field("role", "must have the role user, assistant or system"),
]
Messages = Annotated[list[Message], MinLen(1), MaxLen(MAX_MESSAGES), Field(fail_fast=True)]
