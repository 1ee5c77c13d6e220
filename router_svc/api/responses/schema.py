"""The request body of /v1/responses. Unknown fields are ignored by name: clients send many of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Le, MaxLen
from pydantic import Field, StringConstraints

from pdserve.base.sampling import (
    MAX_LOGPROBS,
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    MAX_TEMPERATURE,
    MIN_REPETITION_PENALTY,
)
from router_svc.api.body import CACHE_SALT, INT64, UINT32_MAX, Finite, GeneratingBody, ThinkingTokens
from router_svc.api.openai.messages import TemplateKwargs
from router_svc.api.responses.items import Items, LenientModel
from router_svc.api.responses.tools import ToolChoice, Tools
from router_svc.api.structured import JsonObjectFormat
from router_svc.generation import MAX_PRIORITY

MAX_METADATA = 16
MAX_INCLUDES = 32

#: Values of `include` with an effect. This server has nothing of what the others request.
LOGPROBS = "message.output_text.logprobs"
ENCRYPTED_CONTENT = "reasoning.encrypted_content"

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class Reasoning(LenientModel):
    """How much the model thinks."""

    effort: Effort | None = None


class TextFormat(LenientModel):
    """The output is any text."""

    type: Literal["text"]


class SchemaFormat(LenientModel):
    """The output is JSON of a schema."""

    type: Literal["json_schema"]
    name: Annotated[str, MaxLen(256)] = "response"
    description: str | None = None
    #: A JSON schema.
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class Text(LenientModel):
    """What the text of the output looks like."""

    format: Annotated[TextFormat | JsonObjectFormat | SchemaFormat, Field(discriminator="type")] | None = None


class ResponsesBody(GeneratingBody):
    """POST /v1/responses."""

    nothing: ClassVar[Mapping[str, tuple[object, ...]]] = {"seed": (-1,), "previous_response_id": ("",)}
    tolerates_unknown_fields: ClassVar[bool] = True

    input: Items
    instructions: str | None = None
    max_output_tokens: Annotated[int, Ge(1), Le(UINT32_MAX)] | None = None
    temperature: Annotated[Finite, Ge(0), Le(MAX_TEMPERATURE)] | None = None
    top_p: Annotated[Finite, Gt(0), Le(1)] | None = None
    top_logprobs: Annotated[int, Ge(0), Le(MAX_LOGPROBS)] | None = None
    include: Annotated[list[Annotated[str, MaxLen(128)]], MaxLen(MAX_INCLUDES)] | None = None
    text: Text | None = None
    reasoning: Reasoning | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    stream: bool | None = None
    store: bool | None = None
    background: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    previous_response_id: Annotated[str, MaxLen(256)] | None = None
    metadata: Annotated[dict[Annotated[str, MaxLen(64)], Annotated[str, MaxLen(512)]], MaxLen(MAX_METADATA)] | None = (
        None
    )
    user: Annotated[str, MaxLen(512)] | None = None
    safety_identifier: Annotated[str, MaxLen(512)] | None = None
    prompt_cache_key: Annotated[str, MaxLen(512)] | None = None
    # Fields of pdserve's chats, which OpenAI's API does not have.
    top_k: Annotated[int, Ge(-1), Le(UINT32_MAX)] | None = None
    min_p: Annotated[Finite, Ge(0), Le(1)] | None = None
    presence_penalty: Annotated[Finite, Ge(-MAX_PENALTY), Le(MAX_PENALTY)] | None = None
    frequency_penalty: Annotated[Finite, Ge(-MAX_PENALTY), Le(MAX_PENALTY)] | None = None
    repetition_penalty: Annotated[Finite, Ge(MIN_REPETITION_PENALTY), Le(MAX_REPETITION_PENALTY)] | None = None
    seed: Annotated[int, *INT64] | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    thinking_token_budget: ThinkingTokens | None = None
    cache_salt: Annotated[str, StringConstraints(pattern=CACHE_SALT)] | None = None
    priority: Annotated[int, Ge(-MAX_PRIORITY), Le(MAX_PRIORITY)] | None = None

    @property
    def includes_logprobs(self) -> bool:
        """Whether the output has log-probabilities."""
        return LOGPROBS in (self.include or ()) or bool(self.top_logprobs)
