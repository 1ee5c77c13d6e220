"""The operations of Ollama's API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from router_svc.api.body import Body
from router_svc.api.ollama import answers
from router_svc.api.ollama.embed_schema import OllamaEmbedBody, OllamaEmbeddingsBody
from router_svc.api.ollama.schema import OllamaChatBody, OllamaGenerateBody, OllamaShowBody
from router_svc.api.reference.error_forms import OLLAMA_ERRORS
from router_svc.api.reference.operation import Answer, Operation
from router_svc.api.reference.parameters import GENERATION, RATE_LIMITS

_IGNORED = "Pdserve-Ignored-Fields"
_RUNNING = Answer(
    text="`Ollama is running`, with which clients compare it.", media="text/plain", schema={"type": "string"}
)
_BODY = (413, 415, 429)
_GENERATION = (*_BODY, 404, 422, 499, 502, 503, 504)


def _generation(summary: str, body: type[Body], whole: Any, piece: Any) -> Operation:
    answer = Answer(
        text="Lines of JSON as tokens come; with `stream`: false, one object.",
        schema=whole,
        lines=piece | whole,
        headers=("X-Request-Id", _IGNORED, *RATE_LIMITS),
    )
    return Operation(
        tag="Generation",
        summary=summary,
        body=body,
        answers={200: answer},
        parameters=GENERATION,
        errors=_GENERATION,
        errors_form=OLLAMA_ERRORS,
    )


def _embedding(summary: str, body: type[Body], schema: Any) -> Operation:
    answer = Answer(
        text="The embeddings, in the order of the inputs.",
        schema=schema,
        headers=("X-Request-Id", _IGNORED, *RATE_LIMITS),
    )
    return Operation(
        tag="Embeddings",
        summary=summary,
        body=body,
        answers={200: answer},
        parameters=GENERATION,
        errors=_GENERATION,
        errors_form=OLLAMA_ERRORS,
    )


def _known(summary: str, text: str, schema: Any, body: type[Body] | None = None) -> Operation:
    headers, errors = ((), ()) if body is None else ((_IGNORED,), (*_BODY, 404))
    answers_of = {200: Answer(text=text, schema=schema, headers=headers)}
    return Operation(
        tag="Model", summary=summary, body=body, answers=answers_of, errors=errors, errors_form=OLLAMA_ERRORS
    )


OLLAMA_OPERATIONS: Mapping[tuple[str, str], Operation] = {
    ("POST", "/api/chat"): _generation(
        "Continues a conversation, as Ollama's API", OllamaChatBody, answers.OllamaChatAnswer, answers.OllamaChatPiece
    ),
    ("POST", "/api/generate"): _generation(
        "Answers a single prompt, as Ollama's API",
        OllamaGenerateBody,
        answers.OllamaGenerateAnswer,
        answers.OllamaGeneratePiece,
    ),
    ("POST", "/api/embed"): _embedding(
        "Embeddings of one or several texts, as Ollama's API", OllamaEmbedBody, answers.OllamaEmbeddings
    ),
    ("POST", "/api/embeddings"): _embedding(
        "The embedding of a text, as Ollama's older API", OllamaEmbeddingsBody, answers.OllamaEmbedding
    ),
    ("GET", "/"): Operation(tag="Model", summary="Whether Ollama's API is there", answers={200: _RUNNING}),
    ("GET", "/api/tags"): _known("The model served, as Ollama's API", "A list with one model.", answers.OllamaModels),
    ("POST", "/api/show"): _known(
        "What is known of the model, as Ollama's API", "The model.", answers.OllamaModelInfo, OllamaShowBody
    ),
    ("GET", "/api/ps"): _known(
        "The model, while a decode worker is ready", "A list with one model or none.", answers.OllamaRunningModels
    ),
    ("GET", "/api/version"): _known("The version, as Ollama's API", "The version.", answers.OllamaVersion),
}
