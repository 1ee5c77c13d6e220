"""/api/chat and /api/generate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from aiohttp import web

from pdserve.base.errors import RequestError
from router_svc.api.authentication import client_of
from router_svc.api.event_ids import EventIds
from router_svc.api.event_stream import Formatter
from router_svc.api.generations import OLLAMA_CHAT, OLLAMA_GENERATE
from router_svc.api.ids import Ids
from router_svc.api.models import ModelBackend
from router_svc.api.ollama.content import Piece
from router_svc.api.ollama.errors import CHAT_NAMES, GENERATE_NAMES, in_own_words
from router_svc.api.ollama.formatter import OllamaFormatter
from router_svc.api.ollama.names import chosen_by_name
from router_svc.api.ollama.schema import OllamaBody, OllamaChatBody, OllamaGenerateBody
from router_svc.api.ollama.timing import Timing
from router_svc.api.openai.generation_request import GenerationRequest, chat_request, completion_request
from router_svc.api.openai.schema import CompletionBody
from router_svc.api.responder import FormatterOf, Responder
from router_svc.api.served_model import ServedModel
from router_svc.request.open_requests import OpenRequest

#: Answers of this API have no id: that of the request is in a header.
_NO_PREFIX = ""


class OllamaApi:
    """/api/chat and /api/generate."""

    def __init__(self, responder: Responder) -> None:
        self._responder = responder

    def routes(self) -> list[web.RouteDef]:
        """The endpoints for the application."""
        return [web.post("/api/chat", self._chat), web.post("/api/generate", self._generate)]

    def formatters(self) -> dict[str, FormatterOf]:
        """None: lines have no ids, so that a client cannot say where a stream is to go on."""
        return {}

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        async def chat(opened: OpenRequest, ids: Ids) -> GenerationRequest:
            body = await self._responder.read(request, OllamaChatBody, opened)
            chosen = chosen_by_name(body.model, self._responder.models, client_of(request))
            _require_thinking(body, chosen.model)
            context = chosen.max_model_len()
            with in_own_words(CHAT_NAMES):
                made = await chat_request(
                    body.chat, chosen.model, ids, context, endpoint=OLLAMA_CHAT, default_max_tokens=body.max_tokens
                )
            return replace(made, can_be_resumed=False)

        return await self._responder.respond(request, _NO_PREFIX, chat, self._formatter_of(Piece.to_message))

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        async def generate(opened: OpenRequest, ids: Ids) -> GenerationRequest:
            body = await self._responder.read(request, OllamaGenerateBody, opened)
            chosen = chosen_by_name(body.model, self._responder.models, client_of(request))
            with in_own_words(GENERATE_NAMES):
                return replace(await _generation(body, chosen, ids), can_be_resumed=False)

        return await self._responder.respond(request, _NO_PREFIX, generate, self._formatter_of(Piece.to_response))

    def _formatter_of(self, shape: Callable[[Piece], bytes]) -> FormatterOf:
        """Makes the format of a response to a request that arrives now."""
        timing = Timing()

        def formatter(generation: GenerationRequest, ids: EventIds | None) -> Formatter:
            return OllamaFormatter(generation, timing, shape, self._responder.tokenizer(generation))

        return formatter


async def _generation(body: OllamaGenerateBody, chosen: ModelBackend, ids: Ids) -> GenerationRequest:
    context, model, meant = chosen.max_model_len(), chosen.model, body.meant
    if isinstance(meant, CompletionBody):
        return await completion_request(
            meant, model, ids, context, endpoint=OLLAMA_GENERATE, default_max_tokens=body.max_tokens
        )
    _require_thinking(body, model)
    return await chat_request(meant, model, ids, context, endpoint=OLLAMA_GENERATE, default_max_tokens=body.max_tokens)


def _require_thinking(body: OllamaBody, model: ServedModel) -> None:
    """Raises `RequestError` if the model shall think and cannot."""
    if body.think and not model.messages.thinks:
        raise RequestError(
            f"`think` is {str(body.think).lower()}, but the model `{model.name}` does not think. Leave it out.",
            param="think",
        )
