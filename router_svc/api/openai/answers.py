"""The answers of the OpenAI-compatible endpoints as types: handlers build them, and the OpenAPI document shows them."""

from __future__ import annotations

from typing import Literal, NotRequired

# Python 3.11 has one that pydantic cannot read.
from typing_extensions import TypedDict

Finished = Literal["stop", "length", "tool_calls"]


class PromptTokensDetails(TypedDict):
    """Where the prompt's tokens came from."""

    cached_tokens: int


class CompletionTokensDetails(TypedDict):
    """What the generated tokens were for."""

    reasoning_tokens: int


class Usage(TypedDict):
    """Tokens of a request, over all prompts and choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class CompletionLogprobs(TypedDict):
    """Log-probabilities of a completion: one entry per token in each list.

    With `echo`, those of the prompt come first. Its first token has none.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptTokenLogprob(TypedDict):
    """A token that was likely in the prompt, or that it has there. The likeliest one has rank 1."""

    logprob: float
    rank: int
    decoded_token: str


#: For each token of a prompt but the first, the log-probabilities of tokens there, by their ids.
PromptLogprobs = list[dict[str, PromptTokenLogprob] | None]


class TopLogprob(TypedDict):
    """A token that was likely at this position."""

    token_id: int
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A token of the output with the likeliest alternatives. `rank` is 1 for the likeliest token."""

    rank: int

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
    """A whole choice. `return_token_ids` adds the tokens of prompt and output, and log-probabilities with ids."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    prompt_logprobs: NotRequired[PromptLogprobs]
    prompt_token_ids: NotRequired[list[int]]
    token_ids: NotRequired[list[int]]
    logprob_entries: NotRequired[list[TokenLogprob]]


class CompletionChunkChoice(TypedDict):
    """New text of a choice. The first one of each has the prompt with `echo`, its tokens with `return_token_ids`."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Finished | None
    stop_reason: NotRequired[str | int | None]
    prompt_token_ids: NotRequired[list[int]]
    token_ids: NotRequired[list[int]]
    logprob_entries: NotRequired[list[TokenLogprob]]


class FunctionAnswer(TypedDict):
    """A function with its arguments, which are JSON as text."""

    name: str
    arguments: str


class ToolCallAnswer(TypedDict):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: FunctionAnswer


class ChatMessageAnswer(TypedDict):
    """The assistant's message. `content` is null where there are only calls or thinking."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning: NotRequired[str]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallAnswer]]


class ChatChoice(Ending):
    """A whole choice."""

    index: int
    message: ChatMessageAnswer
    logprobs: ChatLogprobs | None
    token_ids: NotRequired[list[int]]


class FunctionDelta(TypedDict):
    """More of a call. The first one has the name."""

    name: NotRequired[str]
    arguments: str


class ToolCallDelta(TypedDict):
    """More of the call with this index. The first one has the id and the type."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionDelta


class ChatDelta(TypedDict):
    """More of a message. The first one has the role."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    reasoning: NotRequired[str]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallDelta]]


class ChatChunkChoice(TypedDict):
    """New text of a choice."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Finished | None
    stop_reason: NotRequired[str | int | None]
    token_ids: NotRequired[list[int]]


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
    prompt_logprobs: NotRequired[PromptLogprobs]
    prompt_token_ids: NotRequired[list[int]]
    usage: Usage


class ChatCompletionChunk(Envelope):
    """One event of a streamed chat. Without choices, it has the usage of the whole request.

    With `return_token_ids`, the first one has the tokens of the prompt.
    """

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    prompt_token_ids: NotRequired[list[int]]
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
    default_sampling_params: dict[str, float | int | list[str]]


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


class TokenizerInfo(TypedDict):
    """The answer of `GET /tokenizer_info`. Special tokens that the model lacks are null."""

    tokenizer_class: str
    #: The model's. Its logits may have more entries than the tokenizer has tokens.
    vocab_size: int
    model_max_length: int
    bos_token: str | None
    eos_token: str | None
    unk_token: str | None
    pad_token: str | None
    sep_token: str | None
    cls_token: str | None
    eos_token_ids: list[int]
    chat_template: str | None


class Detokenized(TypedDict):
    """The answer of `POST /detokenize`."""

    prompt: str
