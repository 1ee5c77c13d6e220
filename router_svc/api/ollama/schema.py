"""The request bodies of Ollama's API, and the chats and completions that they mean."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Le, MaxLen, MinLen
from pydantic import BeforeValidator, Field, StringConstraints, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from pdserve.base.sampling import (
    MAX_LOGPROBS,
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    MAX_TEMPERATURE,
    MIN_REPETITION_PENALTY,
)
from router_svc.api.body import (
    CACHE_SALT,
    INT64,
    MAX_NAME_CHARACTERS,
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    UINT32_MAX,
    Body,
    Finite,
    GeneratingBody,
)
from router_svc.api.body_schema import Conditions
from router_svc.api.lenient import LENIENT, LenientModel, unknown_fields
from router_svc.api.ollama.conversation import (
    NoImages,
    OllamaMessages,
    OllamaTools,
    chat_messages,
    chat_tools,
    continues,
)
from router_svc.api.openai.messages import ChatMessage
from router_svc.api.openai.schema import ChatBody, CompletionBody
from router_svc.api.structured import JsonObjectFormat, JsonSchemaFormat, NamedSchema, ResponseFormat
from router_svc.generation import MAX_PRIORITY

_SCHEMA_NAME = "output"
_LEVELS = ("low", "medium", "high", "max")
_EMPTY_TEXT = WithJsonSchema({"enum": [None, ""]})


def _format(value: object) -> object:
    if value is None or value in ("", "json") or isinstance(value, dict):
        return value
    raise PydanticCustomError("format", "must be 'json' or a JSON schema")


def _think(value: object) -> object:
    if value is None or isinstance(value, bool) or value in _LEVELS:
        return value
    raise PydanticCustomError("think", f"must be true, false or one of {', '.join(_LEVELS)}")


def _none_of(reason: str) -> BeforeValidator:
    """Refuses every value that is not empty."""

    def check(value: object) -> object:
        if value is None or value in ("", []):
            return None
        raise PydanticCustomError("not_supported", f"is not supported: {reason}")

    return BeforeValidator(check)


class OllamaOptions(LenientModel):
    """How tokens are chosen. An absent option takes the model's default."""

    num_predict: Annotated[int, Ge(-2), Le(UINT32_MAX)] | None = None
    temperature: Annotated[Finite, Ge(0), Le(MAX_TEMPERATURE)] | None = None
    top_k: Annotated[int, Ge(-1), Le(UINT32_MAX)] | None = None
    top_p: Annotated[Finite, Gt(0), Le(1)] | None = None
    min_p: Annotated[Finite, Ge(0), Le(1)] | None = None
    seed: Annotated[int, *INT64] | None = None
    stop: Annotated[list[Annotated[str, MinLen(1), MaxLen(MAX_STOP_CHARACTERS)]], MaxLen(MAX_STOP_STRINGS)] | None = (
        None
    )
    repeat_penalty: Annotated[Finite, Ge(MIN_REPETITION_PENALTY), Le(MAX_REPETITION_PENALTY)] | None = None
    presence_penalty: Annotated[Finite, Ge(-MAX_PENALTY), Le(MAX_PENALTY)] | None = None
    frequency_penalty: Annotated[Finite, Ge(-MAX_PENALTY), Le(MAX_PENALTY)] | None = None


_NO_OPTIONS = OllamaOptions()
#: As Ollama has it.
_NO_SEED = -1


class OllamaBody(GeneratingBody):
    """What both endpoints that generate have in common."""

    model_config = LENIENT
    tolerates_unknown_fields: ClassVar[bool] = True

    stream: Annotated[bool | None, Field(description="Answers with lines of JSON as tokens come. Default: true.")] = (
        None
    )
    format: Annotated[
        Literal["", "json"] | dict[str, Any] | None,
        BeforeValidator(_format),
        Field(description="What the text has to match: `json` for any object, or a JSON schema."),
    ] = None
    think: Annotated[
        bool | Literal["low", "medium", "high", "max"] | None,
        BeforeValidator(_think),
        Field(description="Whether the model thinks, and how much. Default: as it does."),
    ] = None
    options: OllamaOptions | None = None
    logprobs: Annotated[
        bool | None, Field(description="Whether the answer has the log-probabilities of its tokens. Default: false.")
    ] = None
    top_logprobs: Annotated[int, Ge(0), Le(MAX_LOGPROBS)] | None = None
    cache_salt: Annotated[str, StringConstraints(pattern=CACHE_SALT)] | None = None
    priority: Annotated[int, Ge(-MAX_PRIORITY), Le(MAX_PRIORITY)] | None = None

    _unknown: tuple[str, ...] = ()

    @property
    def ignored_fields(self) -> tuple[str, ...]:
        """Names of the fields that were sent and do nothing, at any depth."""
        unused = ["top_logprobs"] if self.top_logprobs and not self.logprobs else []
        return tuple(dict.fromkeys((*self._ignored_fields, *self._unknown, *unused)))

    @property
    def max_tokens(self) -> int | None:
        """Tokens to generate at most; None: until the context ends."""
        given = (self.options or _NO_OPTIONS).num_predict
        return given if given is not None and given > 0 else None

    def _shared_fields(self) -> dict[str, Any]:
        """What chats and completions have of the body, under their names."""
        options = self.options or _NO_OPTIONS
        own = ("temperature", "top_k", "top_p", "min_p", "stop", "presence_penalty", "frequency_penalty")
        return {
            "model": self.model,
            "stream": self.stream is not False,
            "response_format": self._response_format(),
            "seed": None if options.seed == _NO_SEED else options.seed,
            "repetition_penalty": options.repeat_penalty,
            "cache_salt": self.cache_salt,
            "priority": self.priority,
            **{name: getattr(options, name) for name in own},
        }

    def _logprobs(self) -> int | None:
        """Alternatives of each token; None: the answer has no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def _thinking_fields(self) -> dict[str, Any]:
        if self.think is False:
            return {"reasoning_effort": "none", "include_reasoning": False}
        if self.think is True:
            return {"chat_template_kwargs": {"enable_thinking": True, "thinking": True}}
        return {"reasoning_effort": self.think}

    def _response_format(self) -> ResponseFormat | None:
        if isinstance(self.format, dict):
            named = NamedSchema.model_construct(name=_SCHEMA_NAME, json_schema=self.format)
            return JsonSchemaFormat.model_construct(type="json_schema", json_schema=named)
        return JsonObjectFormat.model_construct(type="json_object") if self.format else None


class OllamaChatBody(OllamaBody):
    """POST /api/chat."""

    messages: OllamaMessages
    tools: OllamaTools | None = None

    _chat: ChatBody

    @model_validator(mode="after")
    def _convert(self) -> OllamaChatBody:
        """Makes the chat here, since large bodies are not validated on the event loop."""
        goes_on = continues(self.messages)
        self._chat = ChatBody.model_construct(
            messages=chat_messages(self.messages),
            add_generation_prompt=not goes_on,
            continue_final_message=goes_on,
            tools=chat_tools(self.tools or ()),
            logprobs=self.logprobs,
            top_logprobs=self._logprobs(),
            **self._shared_fields(),
            **self._thinking_fields(),
        )
        self._unknown = tuple(unknown_fields(self))
        return self

    @property
    def chat(self) -> ChatBody:
        """The chat that this request means."""
        return self._chat


class OllamaGenerateBody(OllamaBody):
    """POST /api/generate."""

    conditions: ClassVar[Conditions] = (
        {
            "if": {"required": ["raw"], "properties": {"raw": {"const": True}}},
            "then": {"properties": {"system": {"enum": [None, ""]}}},
        },
    )

    prompt: Annotated[str, MinLen(1), Field(description="What the user says; with `raw`, the prompt as it is.")]
    system: Annotated[str | None, Field(description="Instructions before the prompt. Not with `raw`.")] = None
    raw: bool | None = None
    images: NoImages = None
    suffix: Annotated[
        None,
        _none_of("models that continue a text do not fill the gap before another one"),
        _EMPTY_TEXT,
        Field(description="Not supported."),
    ] = None
    template: Annotated[
        None,
        _none_of("the model's own template is used. With `raw` the prompt is used as it is"),
        _EMPTY_TEXT,
        Field(description="Not supported: the model's own template is used, or none with `raw`."),
    ] = None
    context: Annotated[
        None,
        _none_of("send the conversation to /api/chat"),
        WithJsonSchema({"enum": [None, []]}),
        Field(description="Not supported: /api/chat has conversations."),
    ] = None

    _meant: ChatBody | CompletionBody

    @model_validator(mode="after")
    def _convert(self) -> OllamaGenerateBody:
        if self.raw and self.system:
            raise PydanticCustomError("system", "system needs raw to be false: a raw prompt has no template")
        self._meant = self._completion() if self.raw else self._chat()
        unused = ["think"] if self.raw and self.think is not None else []
        self._unknown = (*unknown_fields(self), *unused)
        return self

    @property
    def meant(self) -> ChatBody | CompletionBody:
        """The chat that this request means, or with `raw` the completion."""
        return self._meant

    def _chat(self) -> ChatBody:
        texts = [("system", self.system)] if self.system else []
        messages = [
            ChatMessage.model_construct(role=role, content=text) for role, text in [*texts, ("user", self.prompt)]
        ]
        return ChatBody.model_construct(
            messages=messages,
            logprobs=self.logprobs,
            top_logprobs=self._logprobs(),
            **self._shared_fields(),
            **self._thinking_fields(),
        )

    def _completion(self) -> CompletionBody:
        return CompletionBody.model_construct(prompt=[self.prompt], logprobs=self._logprobs(), **self._shared_fields())


class OllamaShowBody(Body):
    """POST /api/show."""

    model_config = LENIENT
    tolerates_unknown_fields: ClassVar[bool] = True

    model: Annotated[str, MaxLen(MAX_NAME_CHARACTERS)]
