"""The answers of Ollama's API as types, which the OpenAPI document shows."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

# Python 3.11 has one that pydantic cannot read.
from typing_extensions import TypedDict

from router_svc.api.openai.answers import TokenLogprob

DoneReason = Literal["stop", "length"]
Capability = Literal["completion", "tools", "thinking"]


class OllamaFunctionAnswer(TypedDict):
    """A function and the arguments of its call."""

    index: int
    name: str
    arguments: dict[str, Any]


class OllamaCallAnswer(TypedDict):
    """A call of a tool, complete."""

    id: str
    function: OllamaFunctionAnswer


class OllamaMessageAnswer(TypedDict):
    """The message, or more of it."""

    role: Literal["assistant"]
    content: str
    thinking: NotRequired[str]
    tool_calls: NotRequired[list[OllamaCallAnswer]]


class OllamaEnd(TypedDict):
    """How the answer has ended, and what it took. Durations are in nanoseconds."""

    done: Literal[True]
    done_reason: DoneReason
    total_duration: int
    load_duration: int
    prompt_eval_count: int
    prompt_eval_duration: int
    eval_count: int
    eval_duration: int


class OllamaChatPiece(TypedDict):
    """More of the message."""

    model: str
    created_at: str
    message: OllamaMessageAnswer
    logprobs: NotRequired[list[TokenLogprob]]
    done: Literal[False]


class OllamaChatAnswer(OllamaEnd):
    """The whole message, or the last line of a stream."""

    model: str
    created_at: str
    message: OllamaMessageAnswer
    logprobs: NotRequired[list[TokenLogprob]]


class OllamaGeneratePiece(TypedDict):
    """More of the text."""

    model: str
    created_at: str
    response: str
    thinking: NotRequired[str]
    logprobs: NotRequired[list[TokenLogprob]]
    done: Literal[False]


class OllamaGenerateAnswer(OllamaEnd):
    """The whole text, or the last line of a stream."""

    model: str
    created_at: str
    response: str
    thinking: NotRequired[str]
    logprobs: NotRequired[list[TokenLogprob]]


class OllamaEmbeddings(TypedDict):
    """The answer of `POST /api/embed`, in the order of the inputs. Durations are in nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbedding(TypedDict):
    """The answer of `POST /api/embeddings`."""

    embedding: list[float]


class OllamaVersion(TypedDict):
    """The version of pdserve."""

    version: str


class OllamaDetails(TypedDict):
    """What the model is."""

    parent_model: str
    format: Literal["safetensors"]
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModel(TypedDict):
    """The served model. `digest` is known while a worker is; `size` where the router has the weights."""

    name: str
    model: str
    modified_at: str
    size: NotRequired[int]
    digest: NotRequired[str]
    details: OllamaDetails


class OllamaModels(TypedDict):
    """The answer of `GET /api/tags`."""

    models: list[OllamaModel]


class OllamaRunningModel(TypedDict):
    """The served model, while a decode worker is ready. `context_length` is what workers serve."""

    name: str
    model: str
    digest: str
    details: OllamaDetails
    context_length: int


class OllamaRunningModels(TypedDict):
    """The answer of `GET /api/ps`."""

    models: list[OllamaRunningModel]


class OllamaModelInfo(TypedDict):
    """The answer of `POST /api/show`."""

    modified_at: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, str | int | float]
    capabilities: list[Capability]
