"""The request bodies. Strict: a wrong type is refused, not converted, and so is a field that does not exist."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, MaxLen, MinLen
from pydantic import (
    AfterValidator,
    AllowInfNan,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from pdserve.base.sampling import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_N, MAX_STOP_TOKEN_IDS
from router_svc.api.fields import IGNORED, MESSAGE_UNSUPPORTED, UNSUPPORTED, without_neutral

MAX_STOP_STRINGS = 4
MAX_STOP_CHARACTERS = 256
MAX_MESSAGES = 4096
MAX_PROMPTS = 512
MAX_TEMPLATE_KWARGS = 16
MAX_NAME_CHARACTERS = 256

#: Names in a chat template that are not the client's to set.
_TEMPLATE_OWN = frozenset({"self", "messages", "add_generation_prompt", "tools", "documents"})
_UINT32_MAX = 2**32 - 1
_INT64 = (Ge(-(2**63)), Le(2**63 - 1))

Finite = Annotated[float, AllowInfNan(False)]
TokenId = Annotated[int, Ge(0), Le(_UINT32_MAX)]
Prompt = str | list[int]
Scalar = bool | int | float | str


def _prompts(value: object) -> list[Prompt]:
    """A string, a list of strings, token ids, or a list of token id lists, as a list of prompts.

    Written by hand: a list of a million token ids is checked in a few milliseconds, and an error names the prompt
    instead of every member of a union.
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
    # Comparing types keeps out booleans, which are integers to isinstance.
    return not values or all(kind is int for kind in set(map(type, values)))


def _one_or_more(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _flat_content(value: object) -> object:
    """Text parts as one string; other kinds of parts are refused by their name."""
    if not isinstance(value, list):
        return value
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("text") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(text, str) or len(part) > 2:
            raise PydanticCustomError("content_part", "may only have parts of the form {'type': 'text', 'text': ...}")
        texts.append(text)
    return "\n".join(texts)


def _template_kwarg_name(name: str) -> str:
    if name in _TEMPLATE_OWN or not name.isidentifier():
        raise PydanticCustomError("template_kwarg", "is not a name that a chat template takes from clients")
    return name


def _scalar(value: object) -> Scalar:
    if isinstance(value, (bool, int, float, str)):
        return value
    raise PydanticCustomError("scalar", "must be a string, a number, true or false")


class Body(BaseModel):
    """What every body has in common."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_what_asks_for_nothing(cls, value: object) -> object:
        if not isinstance(value, dict):
            return value
        own = cls.model_fields
        unsupported = {name: neutral for name, neutral in UNSUPPORTED.items() if name not in own}
        kept = {name: field for name, field in value.items() if name not in IGNORED}
        return without_neutral(kept, unsupported)


class StreamOptions(Body):
    """How a stream is sent."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(Body):
    """How tokens are chosen. An absent or null field takes the model's default."""

    temperature: Annotated[Finite, Ge(0), Le(2)] | None = None
    top_p: Annotated[Finite, Gt(0), Le(1)] | None = None
    top_k: Annotated[int, Ge(-1), Le(_UINT32_MAX)] | None = None
    min_p: Annotated[Finite, Ge(0), Le(1)] | None = None
    repetition_penalty: Annotated[Finite, Ge(0.01), Le(10)] | None = None
    presence_penalty: Annotated[Finite, Ge(-2), Le(2)] | None = None
    frequency_penalty: Annotated[Finite, Ge(-2), Le(2)] | None = None
    logit_bias: Annotated[dict[str, Annotated[Finite, Ge(-100), Le(100)]], MaxLen(MAX_LOGIT_BIAS)] | None = None
    stop: (
        Annotated[
            list[Annotated[str, MinLen(1), MaxLen(MAX_STOP_CHARACTERS)]],
            MaxLen(MAX_STOP_STRINGS),
            BeforeValidator(_one_or_more),
        ]
        | None
    ) = None
    stop_token_ids: Annotated[list[TokenId], MaxLen(MAX_STOP_TOKEN_IDS)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Ge(0), Le(_UINT32_MAX)] | None = None
    max_tokens: Annotated[int, Ge(1), Le(_UINT32_MAX)] | None = None
    seed: Annotated[int, *_INT64] | None = None
    n: Annotated[int, Ge(1), Le(MAX_N)] | None = None


class GenerationBody(SamplingFields):
    """What completions and chat have in common."""

    model: Annotated[str, MaxLen(MAX_NAME_CHARACTERS)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    add_special_tokens: bool | None = None

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("stream_options", "stream_options needs stream to be true")
        return self


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: Annotated[list[Prompt], PlainValidator(_prompts)]
    logprobs: Annotated[int, Ge(0), Le(MAX_LOGPROBS)] | None = None
    echo: bool | None = None

    @model_validator(mode="after")
    def _echo_is_text_only(self) -> CompletionBody:
        if self.echo and self.logprobs is not None:
            raise PydanticCustomError("echo", "echo together with logprobs is not supported")
        return self


class Message(BaseModel):
    """One message of a conversation."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | None, BeforeValidator(_flat_content)] = None
    name: Annotated[str, MaxLen(MAX_NAME_CHARACTERS)] | None = None
    tool_call_id: Annotated[str, MaxLen(MAX_NAME_CHARACTERS)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_what_says_nothing(cls, value: object) -> object:
        return without_neutral(value, MESSAGE_UNSUPPORTED) if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _only_the_assistant_may_be_silent(self) -> Message:
        if self.content is None and self.role != "assistant":
            raise PydanticCustomError("content", f"a message of role {self.role} needs content")
        return self

    def for_template(self) -> dict[str, str]:
        """What chat templates read."""
        return {"role": self.role, "content": self.content or ""} | ({"name": self.name} if self.name else {})


Messages = Annotated[list[Message], MinLen(1), MaxLen(MAX_MESSAGES), Field(fail_fast=True)]
TemplateKwargs = Annotated[
    dict[
        Annotated[str, MaxLen(MAX_NAME_CHARACTERS), AfterValidator(_template_kwarg_name)],
        Annotated[Scalar, PlainValidator(_scalar)],
    ],
    MaxLen(MAX_TEMPLATE_KWARGS),
]


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: Annotated[int, Ge(1), Le(_UINT32_MAX)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Ge(0), Le(MAX_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: TemplateKwargs | None = None

    @model_validator(mode="after")
    def _top_logprobs_need_logprobs(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise PydanticCustomError("top_logprobs", "top_logprobs needs logprobs to be true")
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

    @model_validator(mode="after")
    def _one_of_both(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError("prompt", "give either prompt or messages")
        return self


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: Annotated[str, MaxLen(MAX_NAME_CHARACTERS)] | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]
