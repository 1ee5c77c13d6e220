"""/v1/completions and /v1/chat/completions."""

from __future__ import annotations

from aiohttp import web

from router_svc.api.event_ids import EventIds
from router_svc.api.event_stream import Formatter
from router_svc.api.generations import CHAT, COMPLETIONS
from router_svc.api.ids import Ids
from router_svc.api.openai.chat_format import ChatFormat
from router_svc.api.openai.completion_format import CompletionFormat
from router_svc.api.openai.generation_request import GenerationRequest, chat_request, completion_request
from router_svc.api.openai.prompt_logprobs import ScoredPrompt
from router_svc.api.openai.schema import ChatBody, CompletionBody
from router_svc.api.openai.shapes import ResponseFormatter
from router_svc.api.responder import FormatterOf, Responder
from router_svc.request.open_requests import OpenRequest


class GenerationApi:
    """/v1/completions and /v1/chat/completions."""

    def __init__(self, responder: Responder) -> None:
        self._responder = responder

    def routes(self) -> list[web.RouteDef]:
        """The endpoints for the application."""
        return [
            web.post("/v1/completions", self._completions),
            web.post("/v1/chat/completions", self._chat),
        ]

    def formatters(self) -> dict[str, FormatterOf]:
        """The format of the responses, by endpoint."""
        return {COMPLETIONS.name: self._completion_formatter, CHAT.name: self._chat_formatter}

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        async def completion(opened: OpenRequest, ids: Ids) -> GenerationRequest:
            body = await self._responder.read(request, CompletionBody, opened)
            chosen = self._responder.backend(request, body.model)
            return await completion_request(body, chosen.model, ids, chosen.max_model_len())

        return await self._responder.respond(request, "cmpl-", completion, self._completion_formatter)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        async def chat(opened: OpenRequest, ids: Ids) -> GenerationRequest:
            body = await self._responder.read(request, ChatBody, opened)
            chosen = self._responder.backend(request, body.model)
            return await chat_request(body, chosen.model, ids, chosen.max_model_len())

        return await self._responder.respond(request, "chatcmpl-", chat, self._chat_formatter)

    def _completion_formatter(self, generation: GenerationRequest, ids: EventIds | None) -> Formatter:
        tokenizer = self._responder.tokenizer(generation)
        return ResponseFormatter(generation, CompletionFormat(generation, tokenizer), ids)

    def _chat_formatter(self, generation: GenerationRequest, ids: EventIds | None) -> Formatter:
        prompts = generation.prompts_of_choices
        scored, alternatives = None, generation.prompt_logprobs
        if alternatives is not None:
            scored = ScoredPrompt(token_ids=generation.generations[0].prompt, alternatives=alternatives)
        tokenizer = self._responder.tokenizer(generation)
        choices = ChatFormat(tokenizer, generation.response_id, generation.reading, prompts, scored)
        return ResponseFormatter(generation, choices, ids)
