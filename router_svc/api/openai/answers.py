"""The answers of the OpenAI-compatible endpoints as types: handlers build them, and the OpenAPI document shows them."""

from __future__ import annotations

from typing import Literal, NotRequired

# Python 3.11 has one that pydantic cannot read.
from typing_extensions import TypedDict

Finished = Literal["stop", "length"]


class PromptTokensDetails(TypedDict):
    """Where the prompt's tokens came from."""

    cached_tokens: int


class Usage(TypedDict):
    """Tokens of a request, over all prompts and choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(TypedDict):
    """Log-probabilities of a completion: one entry per token in each list."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TopLogprob(TypedDict):
    """A token that was likely at this position."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A token of a chat with the likeliest alternatives."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    """Log-probabilities of a chat."""

    content: list[TokenLogprob]
    refusal: None


class Ending(TypedDict):
    """How a choice ended. `stop_reason` is the stop string or stop token that ended it."""

    finish_reason: Finished | None
    stop_reason: str | int | None


class CompletionChoice(Ending):
    """A whole choice."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None


class CompletionChunkChoice(TypedDict):
    """New text of a choice. The first one of each has the prompt with `echo`."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Finished | None
    stop_reason: NotRequired[str | int | None]


class ChatMessageAnswer(TypedDict):
    """The assistant's message."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(Ending):
    """A whole choice."""

    index: int
    message: ChatMessageAnswer
    logprobs: ChatLogprobs | None


class ChatDelta(TypedDict):
    """New text of a message. The first one has the role."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]


class ChatChunkChoice(TypedDict):
    """New text of a choice."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Finished | None
    stop_reason: NotRequired[str | int | None]


class Envelope(TypedDict):
    """What all answers of the generating endpoints start with."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class Completion(Envelope):
    """The answer of `POST /v1/completions`."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunk(Envelope):
    """One event of a streamed completion. Without choices, it has the usage of the whole request."""

    object: Literal["text_completion"]
    choices: list[CompletionChunkChoice]
    usage: NotRequired[Usage | None]


class ChatCompletion(Envelope):
    """The answer of `POST /v1/chat/completions`."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage


class ChatCompletionChunk(Envelope):
    """One event of a streamed chat. Without choices, it has the usage of the whole request."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage | None]


class Model(TypedDict):
    """The model that this server has."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int


class ModelList(TypedDict):
    """The answer of `GET /v1/models`."""

    object: Literal["list"]
    data: list[Model]


class Version(TypedDict):
    """The router's version."""

    version: str


class Tokens(TypedDict):
    """The answer of `POST /tokenize`. `token_strs` needs `return_token_strs`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(TypedDict):
    """The answer of `POST /detokenize`."""

    prompt: str
