"""The answers of the Messages API as types: handlers build them, and the OpenAPI document shows them."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

# Python 3.11 has one that pydantic cannot read.
from typing_extensions import TypedDict

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class TextAnswer(TypedDict):
    """Text."""

    type: Literal["text"]
    text: str


class ThinkingAnswer(TypedDict):
    """The model's thinking. The signature says that it is this cluster's."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseAnswer(TypedDict):
    """A call of a tool."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


BlockAnswer = TextAnswer | ThinkingAnswer | ToolUseAnswer


class OutputTokensDetails(TypedDict):
    """What the generated tokens were for."""

    thinking_tokens: int


class MessageUsage(TypedDict):
    """Tokens of a request. The prompt has the sum of the first three."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: NotRequired[OutputTokensDetails]


class Ends(TypedDict):
    """How a message has ended. `stop_sequence` is the client's text that ended it."""

    stop_reason: StopReason | None
    stop_sequence: str | None


class MessageAnswer(Ends):
    """A whole message, or its start."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[BlockAnswer]
    usage: MessageUsage


class MessageStart(TypedDict):
    """The first event."""

    type: Literal["message_start"]
    message: MessageAnswer


class BlockStart(TypedDict):
    """A block, without its content."""

    type: Literal["content_block_start"]
    index: int
    content_block: BlockAnswer


class TextDelta(TypedDict):
    """More text."""

    type: Literal["text_delta"]
    text: str


class ThinkingDelta(TypedDict):
    """More thinking."""

    type: Literal["thinking_delta"]
    thinking: str


class SignatureDelta(TypedDict):
    """The signature of the thinking, which is complete."""

    type: Literal["signature_delta"]
    signature: str


class InputDelta(TypedDict):
    """More of a call's arguments, which are JSON in the end."""

    type: Literal["input_json_delta"]
    partial_json: str


AnyDelta = TextDelta | ThinkingDelta | SignatureDelta | InputDelta


class BlockDelta(TypedDict):
    """More of the last block."""

    type: Literal["content_block_delta"]
    index: int
    delta: AnyDelta


class BlockStop(TypedDict):
    """The block is complete."""

    type: Literal["content_block_stop"]
    index: int


class MessageDelta(TypedDict):
    """How the message has ended, and its usage."""

    type: Literal["message_delta"]
    delta: Ends
    usage: MessageUsage


class MessageStop(TypedDict):
    """The last event."""

    type: Literal["message_stop"]


class Ping(TypedDict):
    """Nothing: it keeps the connection open."""

    type: Literal["ping"]


BlockEvent = BlockStart | BlockDelta | BlockStop
MessageEvent = MessageStart | BlockEvent | MessageDelta | MessageStop | Ping


class TokenCount(TypedDict):
    """The tokens of a conversation."""

    input_tokens: int
