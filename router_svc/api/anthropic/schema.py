"""The request bodies of the Messages API, and the chats that they mean."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Le, MaxLen, MinLen
from pydantic import Field, StringConstraints, model_validator

from pdserve.base.errors import RequestError
from pdserve.base.sampling import MAX_TEMPERATURE, MAX_THINKING
from router_svc.api.anthropic.blocks import Messages, TextBlocks
from router_svc.api.anthropic.conversation import chat_messages, continues
from router_svc.api.anthropic.tools import ToolChoice, Tools, allows_parallel, chat_tool_choice, chat_tools
from router_svc.api.body import (
    CACHE_SALT,
    INT64,
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    UINT32_MAX,
    Finite,
    GeneratingBody,
)
from router_svc.api.body_schema import NULL, Conditions
from router_svc.api.lenient import LENIENT, LenientModel, unknown_fields
from router_svc.api.openai.schema import ChatBody
from router_svc.api.structured import JsonSchemaFormat, NamedSchema
from router_svc.generation import MAX_PRIORITY

#: The name of the field that bounds the thinking, for reports that it does nothing.
THINKING_BUDGET = "thinking.budget_tokens"
_SCHEMA_NAME = "output"


class ThinkingConfig(LenientModel):
    """Whether the model thinks before it answers."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Ge(1), Le(MAX_THINKING)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class JsonOutputFormat(LenientModel):
    """JSON that a schema accepts."""

    type: Literal["json_schema"]
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(LenientModel):
    """What the answer has to be like."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: Annotated[
        JsonOutputFormat | None, Field(description="What the text has to match, as `response_format` of chats.")
    ] = None


class ConversationBody(GeneratingBody):
    """POST /v1/messages/count_tokens: the conversation of a message."""

    model_config = LENIENT
    conditions: ClassVar[Conditions] = (
        {
            "if": {"required": ["output_format"], "properties": {"output_format": {"not": NULL}}},
            "then": {"properties": {"output_config": {"properties": {"format": NULL}}}},
        },
    )
    tolerates_unknown_fields: ClassVar[bool] = True

    messages: Messages
    system: TextBlocks | None = None
    thinking: Annotated[ThinkingConfig | None, Field(description="Whether the model thinks. Default: as it does.")] = (
        None
    )
    tools: Annotated[Tools | None, Field(description="The tools of the client that the model may call.")] = None
    tool_choice: Annotated[
        ToolChoice | None, Field(description="Whether the answer calls tools. Default: as the model decides.")
    ] = None
    output_config: OutputConfig | None = None
    #: As those of blocks: every prefix is cached.
    cache_control: Any = None
    output_format: Annotated[JsonOutputFormat | None, Field(description="Older name of `output_config.format`.")] = None

    _chat: ChatBody
    _unknown: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _convert(self) -> ConversationBody:
        """Makes the chat here, since large bodies are not validated on the event loop."""
        if self.output_format is not None and self.output_config is not None and self.output_config.format is not None:
            raise RequestError(
                "`output_format` and `output_config.format` say the same. Send only one of them.", param="output_format"
            )
        self._chat = ChatBody.model_construct(**self._chat_fields())
        names = dict.fromkeys(unknown_fields(self))
        if self.thinking is not None and self.thinking.budget_tokens is not None and self._budget is None:
            names[THINKING_BUDGET] = None
        self._unknown = tuple(names)
        return self

    @property
    def ignored_fields(self) -> tuple[str, ...]:
        """Names of the fields that were sent and do nothing, at any depth."""
        return tuple(dict.fromkeys((*self._ignored_fields, *self._unknown)))

    @property
    def chat(self) -> ChatBody:
        """The chat that this request means."""
        return self._chat

    def _chat_fields(self) -> dict[str, Any]:
        goes_on = continues(self.messages)
        return {
            "model": self.model,
            "messages": chat_messages(self.system or (), self.messages),
            "add_generation_prompt": not goes_on,
            "continue_final_message": goes_on,
            "tools": chat_tools(self.tools or ()),
            "tool_choice": chat_tool_choice(self.tool_choice),
            "parallel_tool_calls": allows_parallel(self.tool_choice),
            "response_format": self._response_format(),
            **self._thinking_fields(),
        }

    @property
    def _budget(self) -> int | None:
        """Tokens of thinking at most; None: any number."""
        given = self.thinking
        return given.budget_tokens if given is not None and given.type == "enabled" else None

    def _thinking_fields(self) -> dict[str, Any]:
        kind = None if self.thinking is None else self.thinking.type
        if kind == "disabled":
            return {"reasoning_effort": "none", "include_reasoning": False}
        effort = None if self.output_config is None else self.output_config.effort
        switches = {"enable_thinking": True, "thinking": True}
        return {
            "reasoning_effort": effort,
            "chat_template_kwargs": switches if kind is not None else None,
            "thinking_token_budget": self._budget,
        }

    def _response_format(self) -> JsonSchemaFormat | None:
        config = self.output_config
        found = self.output_format if config is None or config.format is None else config.format
        if found is None:
            return None
        named = NamedSchema.model_construct(name=_SCHEMA_NAME, json_schema=found.json_schema)
        return JsonSchemaFormat.model_construct(type="json_schema", json_schema=named)


class MessagesBody(ConversationBody):
    """POST /v1/messages."""

    nothing: ClassVar[Mapping[str, tuple[object, ...]]] = {"seed": (-1,)}

    max_tokens: Annotated[
        int, Ge(1), Le(UINT32_MAX), Field(description="Tokens to generate at most. The context may end before.")
    ]
    stop_sequences: (
        Annotated[list[Annotated[str, MinLen(1), MaxLen(MAX_STOP_CHARACTERS)]], MaxLen(MAX_STOP_STRINGS)] | None
    ) = None
    stream: bool | None = None
    temperature: Annotated[Finite, Ge(0), Le(MAX_TEMPERATURE)] | None = None
    top_p: Annotated[Finite, Gt(0), Le(1)] | None = None
    top_k: Annotated[int, Ge(-1), Le(UINT32_MAX)] | None = None
    seed: Annotated[int, *INT64] | None = None
    cache_salt: Annotated[str, StringConstraints(pattern=CACHE_SALT)] | None = None
    priority: Annotated[int, Ge(-MAX_PRIORITY), Le(MAX_PRIORITY)] | None = None

    def _chat_fields(self) -> dict[str, Any]:
        own = ("stream", "temperature", "top_p", "top_k", "seed", "cache_salt", "priority")
        # Not `max_tokens`: a chat with more of them than the context has is refused.
        return {**super()._chat_fields(), "stop": self.stop_sequences, **{name: getattr(self, name) for name in own}}

    @property
    def omits_thinking(self) -> bool:
        """Whether the client gets blocks of thinking without their text."""
        return self.thinking is not None and self.thinking.display == "omitted"
