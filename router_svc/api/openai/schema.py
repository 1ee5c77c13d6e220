"""The request bodies of the HTTP API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Le, MaxLen, MinLen
from pydantic import (
    BaseModel,
    PlainValidator,
    StringConstraints,
    model_validator,
)
from pydantic_core import PydanticCustomError

from pdserve.base.sampling import MAX_LOGPROBS
from router_svc.api.body import (
    CACHE_SALT,
    MAX_NAME_CHARACTERS,
    UINT32_MAX,
    Body,
    GeneratingBody,
    SamplingFields,
    StrictModel,
    ThinkingTokens,
    TokenId,
    TruncatePromptTokens,
)
from router_svc.api.body_schema import (
    NULL,
    Conditions,
    entries_require,
    excludes,
    one_of,
    requires,
)
from router_svc.api.openai.messages import ChatMessage, Documents, Messages, TemplateKwargs, TemplateSource
from router_svc.api.openai.tools import ToolChoice, Tools
from router_svc.api.structured import StructuredFields
from router_svc.generation import MAX_PRIORITY

MAX_PROMPTS = 512
#: Inputs of a request for embeddings, as in OpenAI's API.
MAX_INPUTS = 2048

#: Values that are checked in one call.
_CHECKED_TOGETHER = 65_536

Prompt = str | list[int]

# What the validators below accept, for the document.
_Text = Annotated[str, MinLen(1)]
_TokenIds = Annotated[list[TokenId], MinLen(1)]
PromptInput = (
    _Text
    | Annotated[list[_Text], MinLen(1), MaxLen(MAX_PROMPTS)]
    | _TokenIds
    | Annotated[list[_TokenIds], MinLen(1), MaxLen(MAX_PROMPTS)]
)
EmbeddingInput = (
    _Text
    | Annotated[list[_Text], MinLen(1), MaxLen(MAX_INPUTS)]
    | _TokenIds
    | Annotated[list[_TokenIds], MinLen(1), MaxLen(MAX_INPUTS)]
)


def read_prompts(value: object, limit: int = MAX_PROMPTS) -> list[Prompt]:
    """A string, a list of strings, token ids, or a list of token id lists, as a list of prompts, up to a limit.

    Written by hand instead of as a union: this validates a million token ids in a few milliseconds, and its errors do
    not list every member of the union.
    """
    prompts: list[object] = [value] if not isinstance(value, list) or _is_token_ids(value) else value
    if not prompts or len(prompts) > limit:
        raise PydanticCustomError("prompt_count", f"must be 1 to {limit} prompts")
    checked: list[Prompt] = []
    for prompt in prompts:
        if isinstance(prompt, str) or (isinstance(prompt, list) and _is_token_ids(prompt)):
            checked.append(prompt)
        else:
            raise PydanticCustomError(
                "prompt_type", "must be a string, a list of strings, a list of token ids, or a list of such lists"
            )
    if len({type(prompt) for prompt in checked}) > 1:
        raise PydanticCustomError("prompt_type", "must not mix strings and token ids")
    if not all(checked):
        raise PydanticCustomError("prompt_empty", "must not be empty")
    return checked


def _is_token_ids(values: list[object]) -> bool:
    # Compares types, because booleans are integers to isinstance.
    return not values or all(kind is int for kind in set(map(type, values)))


def _token_ids(value: object) -> list[int]:
    """Token ids in any number. By hand, because pydantic's own validation is one long call."""
    if not isinstance(value, list):
        raise PydanticCustomError("token_ids", "must be a list of token ids")
    for start in range(0, len(value), _CHECKED_TOGETHER):
        if not _is_token_ids(value[start : start + _CHECKED_TOGETHER]):
            raise PydanticCustomError("token_ids", "must be a list of token ids, which are integers")
    return value


class StreamOptions(StrictModel):
    """How a stream is sent."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    #: Events are never padded.
    include_obfuscation: Literal[False] | None = None

    @property
    def requests_usage(self) -> bool:
        """Whether a stream differs from one without options."""
        return bool(self.include_usage or self.continuous_usage_stats)


_ASKS_FOR_USAGE = {
    "type": "object",
    "anyOf": [
        {"required": [name], "properties": {name: {"const": True}}}
        for name in ("include_usage", "continuous_usage_stats")
    ],
}


class GenerationBody(GeneratingBody, SamplingFields, StructuredFields):
    """Fields that completions and chats have in common."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: TruncatePromptTokens | None = None
    return_token_ids: bool | None = None
    prompt_logprobs: Annotated[int, Ge(0), Le(MAX_LOGPROBS)] | None = None
    #: Prompts share cached blocks only with prompts of the same salt.
    cache_salt: Annotated[str, StringConstraints(pattern=CACHE_SALT)] | None = None
    #: Lower values come first.
    priority: Annotated[int, Ge(-MAX_PRIORITY), Le(MAX_PRIORITY)] | None = None

    conditions: ClassVar[Conditions] = (
        requires("stream_options", _ASKS_FOR_USAGE, "stream", True),
        excludes("stream", True, "prompt_logprobs"),
    )

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> GenerationBody:
        if self.stream_options is not None and self.stream_options.requests_usage and not self.stream:
            raise PydanticCustomError("stream_options", "stream_options requires stream to be true")
        return self

    @model_validator(mode="after")
    def _prompt_logprobs_are_not_streamed(self) -> GenerationBody:
        if self.prompt_logprobs is not None and self.stream:
            raise PydanticCustomError("prompt_logprobs", "prompt_logprobs requires stream to be false")
        return self


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: Annotated[list[Prompt], PlainValidator(read_prompts, json_schema_input_type=PromptInput)]
    logprobs: Annotated[int, Ge(0), Le(MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    max_tokens: Annotated[int, Ge(0), Le(UINT32_MAX)] | None = None

    #: Clients that fill in every field send that of chats, too.
    nothing: ClassVar[Mapping[str, tuple[object, ...]]] = {**GenerationBody.nothing, "logprobs": (False,)}
    conditions: ClassVar[Conditions] = (
        *GenerationBody.conditions,
        requires("max_tokens", {"const": 0}, "echo", True),
        entries_require("logprob_token_ids", "logprobs", {"not": NULL}),
    )

    @model_validator(mode="after")
    def _no_tokens_need_an_echo(self) -> CompletionBody:
        if self.max_tokens == 0 and not self.echo:
            raise PydanticCustomError("max_tokens", "max_tokens of 0 requires echo to be true")
        return self


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    tolerant_lists: ClassVar[Mapping[str, type[BaseModel]]] = {"messages": ChatMessage}

    messages: Messages
    max_completion_tokens: Annotated[int, Ge(1), Le(UINT32_MAX)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Ge(0), Le(MAX_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = None
    chat_template: TemplateSource | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    continue_final_message: bool | None = None
    documents: Documents | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: ThinkingTokens | None = None

    nothing: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **GenerationBody.nothing,
        "logprobs": (0,),
        "top_logprobs": (0,),
        "chat_template": ("",),
    }
    conditions: ClassVar[Conditions] = (
        *GenerationBody.conditions,
        requires("top_logprobs", {"type": "integer", "minimum": 1}, "logprobs", True),
        requires("continue_final_message", {"const": True}, "add_generation_prompt", False),
        entries_require("logprob_token_ids", "logprobs", {"const": True}),
    )

    @model_validator(mode="after")
    def _top_logprobs_need_logprobs(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise PydanticCustomError("top_logprobs", "top_logprobs requires logprobs to be true")
        return self

    @model_validator(mode="after")
    def _a_message_that_goes_on_is_the_last(self) -> ChatBody:
        if self.continue_final_message and self.add_generation_prompt is not False:
            raise PydanticCustomError(
                "continue_final_message", "continue_final_message requires add_generation_prompt to be false"
            )
        return self


class TokenizeBody(Body):
    """POST /tokenize: a prompt or a conversation."""

    model: Annotated[str, MaxLen(MAX_NAME_CHARACTERS)] | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None
    chat_template: TemplateSource | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    documents: Documents | None = None
    tools: Tools | None = None

    nothing: ClassVar[Mapping[str, tuple[object, ...]]] = {"chat_template": ("",)}
    conditions: ClassVar[Conditions] = (one_of("prompt", "messages"),)

    @model_validator(mode="after")
    def _either_prompt_or_messages(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError("prompt", "send either prompt or messages")
        return self


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: Annotated[str, MaxLen(MAX_NAME_CHARACTERS)] | None = None
    tokens: Annotated[list[int], PlainValidator(_token_ids, json_schema_input_type=list[TokenId])]
