"""/api/chat and /api/generate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from pdserve.base.errors import RequestError
from router_svc.api.event_ids import EventIds
from router_svc.api.event_stream import Formatter
from router_svc.api.generations import OLLAMA_CHAT, OLLAMA_GENERATE, GenerationFactory
from router_svc.api.ollama.content import Piece
from router_svc.api.ollama.errors import CHAT_NAMES, GENERATE_NAMES, in_own_words
from router_svc.api.ollama.formatter import OllamaFormatter
from router_svc.api.ollama.names import chosen_by_name
from router_svc.api.ollama.schema import OllamaBody, OllamaChatBody, OllamaGenerateBody
from router_svc.api.ollama.timing import Timing
from router_svc.api.openai.generation_request import GenerationRequest, chat_request, completion_request
from router_svc.api.openai.schema import CompletionBody
from router_svc.api.responder import FormatterOf, GeneratingEndpoint, Responder
from router_svc.api.served_model import ServedModel


def _formatter(shape: Callable[[Piece], bytes]) -> Callable[[Responder], FormatterOf]:
    def arrived(responder: Responder) -> FormatterOf:
        timing = Timing()

        def formatter(generation: GenerationRequest, ids: EventIds | None) -> Formatter:
            return OllamaFormatter(generation, timing, shape, responder.tokenizer(generation))

        return formatter

    return arrived


async def _chat(body: OllamaChatBody, factory: GenerationFactory) -> GenerationRequest:
    _require_thinking(body, factory.model)
    with in_own_words(CHAT_NAMES):
        made = await chat_request(body.chat, factory, default_max_tokens=body.max_tokens)
    return replace(made, can_be_resumed=False)


async def _generate(body: OllamaGenerateBody, factory: GenerationFactory) -> GenerationRequest:
    meant, limit = body.meant, body.max_tokens
    with in_own_words(GENERATE_NAMES):
        if isinstance(meant, CompletionBody):
            made = await completion_request(meant, factory, default_max_tokens=limit)
        else:
            _require_thinking(body, factory.model)
            made = await chat_request(meant, factory, default_max_tokens=limit)
    return replace(made, can_be_resumed=False)


def _require_thinking(body: OllamaBody, model: ServedModel) -> None:
    """Raises `RequestError` if the model shall think and cannot."""
    if body.think and not model.messages.thinks:
        raise RequestError(
            f"`think` is {str(body.think).lower()}, but the model `{model.name}` does not think. Leave it out.",
            param="think",
        )


#: Answers have no id: the request's id is in a header. Lines have no ids either, so no stream can be resumed.
OLLAMA_CHAT_ENDPOINT = GeneratingEndpoint(
    endpoint=OLLAMA_CHAT,
    id_prefix="",
    body=OllamaChatBody,
    make=_chat,
    formatter=_formatter(Piece.to_message),
    choose=chosen_by_name,
)
OLLAMA_GENERATE_ENDPOINT = GeneratingEndpoint(
    endpoint=OLLAMA_GENERATE,
    id_prefix="",
    body=OllamaGenerateBody,
    make=_generate,
    formatter=_formatter(Piece.to_response),
    choose=chosen_by_name,
)
