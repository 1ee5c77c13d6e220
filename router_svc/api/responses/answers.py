"""The answers of /v1/responses as types, for the OpenAPI document."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

# Python 3.11 has one that pydantic cannot read.
from typing_extensions import TypedDict

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class InputTokensDetails(TypedDict):
    """Where the prompt's tokens came from."""

    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(TypedDict):
    """What the generated tokens were for."""

    reasoning_tokens: int


class ResponseUsage(TypedDict):
    """Tokens of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ContentText(TypedDict):
    """Text of a message, or thinking."""

    type: Literal["output_text", "reasoning_text"]
    text: str
    annotations: NotRequired[list[Any]]
    logprobs: NotRequired[list[Any]]


class OutputItem(TypedDict):
    """A message, thinking, or a call."""

    id: str
    type: Literal["message", "reasoning", "function_call", "custom_tool_call"]
    status: Literal["in_progress", "completed", "incomplete"]
    role: NotRequired[Literal["assistant"]]
    content: NotRequired[list[ContentText]]
    summary: NotRequired[list[Any]]
    encrypted_content: NotRequired[str]
    call_id: NotRequired[str]
    name: NotRequired[str]
    namespace: NotRequired[str]
    arguments: NotRequired[str]
    input: NotRequired[str]


class IncompleteDetails(TypedDict):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class FailedDetails(TypedDict):
    """Why a response has failed."""

    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]
    message: str


class ResponseObject(TypedDict):
    """A response. The fields after `usage` repeat the request."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Status
    error: FailedDetails | None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None
    background: bool
    previous_response_id: str | None
    service_tier: str
    store: bool
    truncation: str
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    user: str | None


class ResponseEvent(TypedDict):
    """An event. Which fields there are depends on the type."""

    type: str
    sequence_number: int
    response: NotRequired[ResponseObject]
    item: NotRequired[OutputItem]
    part: NotRequired[ContentText]
    item_id: NotRequired[str]
    output_index: NotRequired[int]
    content_index: NotRequired[int]
    delta: NotRequired[str]
    text: NotRequired[str]
    arguments: NotRequired[str]
    input: NotRequired[str]
    name: NotRequired[str]
    logprobs: NotRequired[list[Any]]


class DeletedResponse(TypedDict):
    """A response that was deleted."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class ItemList(TypedDict):
    """A page of the items that a response continues."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
