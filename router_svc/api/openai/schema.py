"""The request bodies of the HTTP API."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Gt, Le, MaxLen, MinLen
from pydantic import (
    AfterValidator,
    AllowInfNan,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    PlainValidator,
    StringConstraints,
    WithJsonSchema,
    model_validator,
    with_config,
)
from pydantic_core import CoreSchema, PydanticCustomError
from typing_extensions import TypedDict

from pdserve.base.sampling import MAX_LOGPROBS
from pdserve.model.chat_template import SPECIAL_TOKENS
from router_svc.api.body import CACHE_SALT, UINT32_MAX, Body, SamplingFields, TokenId
from router_svc.api.body_schema import (
    Conditions,
    Schema,
    excludes,
    given_unless,
    one_of,
    requires,
    with_conditions,
    with_harmless,
)
from router_svc.api.fields import MESSAGE_UNSUPPORTED, without_neutral
from router_svc.generation import MAX_PRIORITY

MAX_MESSAGES = 4096
MAX_PROMPTS = 512
MAX_TEMPLATE_KWARGS = 16
#: Characters of one value of `chat_template_kwargs`: templates print them, possibly once per message.
MAX_TEMPLATE_KWARG_CHARACTERS = 4096
MAX_NAME_CHARACTERS = 256

#: Variables of chat templates that clients may not set: the request's own, and the model's special tokens.
_TEMPLATE_OWN = frozenset({"self", "messages", "add_generation_prompt", "tools", "documents", *SPECIAL_TOKENS})

#: Values that are checked in one call.
_CHECKED_TOGETHER = 65_536

Prompt = str | list[int]
Scalar = bool | int | float | str

# What the validators below accept, for the document.
_Text = Annotated[str, MinLen(1)]
_TokenIds = Annotated[list[TokenId], MinLen(1)]
_PromptInput = (
    _Text
    | Annotated[list[_Text], MinLen(1), MaxLen(MAX_PROMPTS)]
    | _TokenIds
    | Annotated[list[_TokenIds], MinLen(1), MaxLen(MAX_PROMPTS)]
)
_INT65 = (Ge(-(2**64) + 1), Le(2**64 - 1))
_ScalarInput = (
    bool | Annotated[int, *_INT65] | Annotated[float, *_INT65] | Annotated[str, MaxLen(MAX_TEMPLATE_KWARG_CHARACTERS)]
)
_TemplateKwargName = WithJsonSchema(
    {
        "type": "string",
        "maxLength": MAX_NAME_CHARACTERS,
        "pattern": "^[A-Za-z_][A-Za-z0-9_]*$",
        "not": {"enum": sorted(_TEMPLATE_OWN)},
    }
)


@with_config(ConfigDict(extra="forbid"))
class MessageText(TypedDict):
    """Text of a message."""

    type: Literal["text"]
    text: str


def _prompts(value: object) -> list[Prompt]:
    """A string, a list of strings, token ids, or a list of token id lists, as a list of prompts.

    Written by hand instead of as a union: this validates a million token ids in a few milliseconds, and its errors do
    not list every member of the union.
    """
    prompts: list[object] = [value] if not isinstance(value, list) or _is_token_ids(value) else value
    if not prompts or len(prompts) > MAX_PROMPTS:
        raise PydanticCustomError("prompt_count", f"must be 1 to {MAX_PROMPTS} prompts")
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


def _flat_content(value: object) -> object:
    """Content given as text parts, as one string. Raises an error for other kinds of content."""
    if not isinstance(value, list):
        return value
    texts = []
    for element in value:
        kind = element.get("type") if isinstance(element, dict) else None
        text = element.get("text") if isinstance(element, dict) else None
        if kind != "text" or not isinstance(text, str) or len(element) > 2:
            raise PydanticCustomError("content_part", "may only have parts of the form {'type': 'text', 'text': ...}")
        texts.append(text)
    return "\n".join(texts)


def _template_kwarg_name(name: str) -> str:
    if name in _TEMPLATE_OWN or not name.isidentifier():
        raise PydanticCustomError("template_kwarg", "is not a variable that clients may set in a chat template")
    return name


def _scalar(value: object) -> Scalar:
    if isinstance(value, str) and len(value) > MAX_TEMPLATE_KWARG_CHARACTERS:
        raise PydanticCustomError(
            "template_kwarg_length",
            "has {length} characters (limit {limit}). Send long texts in messages",
            {"length": len(value), "limit": MAX_TEMPLATE_KWARG_CHARACTERS},
        )
    if isinstance(value, int) and value.bit_length() > 64:
        raise PydanticCustomError("template_kwarg_length", "must be an integer of at most 64 bits")
    if isinstance(value, (bool, int, float, str)):
        return value
    raise PydanticCustomError("scalar", "must be a string, a number, true or false")


class StreamOptions(BaseModel):
    """How a stream is sent."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(SamplingFields):
    """Fields that completions and chats have in common."""

    model: Annotated[str, MaxLen(MAX_NAME_CHARACTERS)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    add_special_tokens: bool | None = None
    #: Prompts share cached blocks only with prompts of the same salt.
    cache_salt: Annotated[str, StringConstraints(pattern=CACHE_SALT)] | None = None
    #: Lower values come first.
    priority: Annotated[int, Ge(-MAX_PRIORITY), Le(MAX_PRIORITY)] | None = None
    timeout: Annotated[float, Gt(0), AllowInfNan(False)] | None = None

    conditions: ClassVar[Conditions] = (requires("stream_options", "stream", True),)

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("stream_options", "stream_options requires stream to be true")
        return self


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: Annotated[list[Prompt], PlainValidator(_prompts, json_schema_input_type=_PromptInput)]
    logprobs: Annotated[int, Ge(0), Le(MAX_LOGPROBS)] | None = None
    echo: bool | None = None

    conditions: ClassVar[Conditions] = (*GenerationBody.conditions, excludes("echo", True, "logprobs"))

    @model_validator(mode="after")
    def _echo_is_text_only(self) -> CompletionBody:
        if self.echo and self.logprobs is not None:
            raise PydanticCustomError("echo", "echo together with logprobs is not supported")
        return self


class ChatMessage(BaseModel):
    """One message of a conversation."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        str | None, BeforeValidator(_flat_content, json_schema_input_type=str | list[MessageText] | None)
    ] = None
    name: Annotated[str, MaxLen(MAX_NAME_CHARACTERS)] | None = None
    tool_call_id: Annotated[str, MaxLen(MAX_NAME_CHARACTERS)] | None = None

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> Schema:
        schema = handler.resolve_ref_schema(handler(core))
        with_harmless(schema, MESSAGE_UNSUPPORTED)
        return with_conditions(schema, (given_unless("content", "role", "assistant"),))

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, value: object) -> object:
        return without_neutral(value, MESSAGE_UNSUPPORTED) if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _only_the_assistant_may_omit_content(self) -> ChatMessage:
        if self.content is None and self.role != "assistant":
            raise PydanticCustomError("content", f"a message of role {self.role} requires content")
        return self

    def for_template(self) -> dict[str, str]:
        """The message as chat templates read it."""
        return {"role": self.role, "content": self.content or ""} | ({"name": self.name} if self.name else {})


Messages = Annotated[list[ChatMessage], MinLen(1), MaxLen(MAX_MESSAGES), Field(fail_fast=True)]
TemplateKwargs = Annotated[
    dict[
        Annotated[str, MaxLen(MAX_NAME_CHARACTERS), AfterValidator(_template_kwarg_name), _TemplateKwargName],
        Annotated[Scalar, PlainValidator(_scalar, json_schema_input_type=_ScalarInput)],
    ],
    MaxLen(MAX_TEMPLATE_KWARGS),
]


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: Annotated[int, Ge(1), Le(UINT32_MAX)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Ge(0), Le(MAX_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: TemplateKwargs | None = None

    conditions: ClassVar[Conditions] = (*GenerationBody.conditions, requires("top_logprobs", "logprobs", True))

    @model_validator(mode="after")
    def _top_logprobs_need_logprobs(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise PydanticCustomError("top_logprobs", "top_logprobs requires logprobs to be true")
        return self


class TokenizeBody(Body):
    """POST /tokenize: a prompt or a conversation."""

    model: Annotated[str, MaxLen(MAX_NAME_CHARACTERS)] | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None
    chat_template_kwargs: TemplateKwargs | None = None

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
