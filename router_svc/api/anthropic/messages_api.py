"""/v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from dataclasses import replace

from aiohttp import web

from router_svc.api.anthropic.answers import StopReason, TokenCount
from router_svc.api.anthropic.errors import in_own_words
from router_svc.api.anthropic.formatter import ID_PREFIX, MessageFormatter, request_fields
from router_svc.api.anthropic.schema import THINKING_BUDGET, ConversationBody, MessagesBody
from router_svc.api.anthropic.signatures import Signer
from router_svc.api.event_ids import EventIds
from router_svc.api.event_stream import Formatter
from router_svc.api.generations import MESSAGES
from router_svc.api.http_request import IGNORED_FIELDS, REQUEST_ID_HEADER, read_body
from router_svc.api.ids import Ids
from router_svc.api.json_pieces import to_json
from router_svc.api.openai.chat_prompt import count_chat
from router_svc.api.openai.generation_request import GenerationRequest, chat_request
from router_svc.api.responder import FormatterOf, Responder
from router_svc.api.thinking_budget import can_bound_thinking
from router_svc.request.open_requests import OpenRequest

#: The header in which Anthropic's clients look for the request's id.
_REQUEST_ID = "request-id"


class MessagesApi:
    """/v1/messages and /v1/messages/count_tokens."""

    def __init__(self, responder: Responder) -> None:
        self._responder = responder
        self._signer = Signer(responder.secret)

    def routes(self) -> list[web.RouteDef]:
        """The endpoints for the application."""
        return [
            web.post("/v1/messages", self._messages),
            web.post("/v1/messages/count_tokens", self._count_tokens),
        ]

    def formatters(self) -> dict[str, FormatterOf]:
        """The format of the responses, by endpoint."""
        return {MESSAGES.name: self._formatter}

    async def _messages(self, request: web.Request) -> web.StreamResponse:
        async def message(opened: OpenRequest, ids: Ids) -> GenerationRequest:
            body = await self._responder.read(request, MessagesBody, opened)
            with in_own_words():
                return await self._message_request(request, body, ids)

        return await self._responder.respond(request, ID_PREFIX, message, self._formatter)

    async def _message_request(self, request: web.Request, body: MessagesBody, ids: Ids) -> GenerationRequest:
        """The generation of a message, which has fewer tokens than requested if the context ends before."""
        chosen = self._responder.backend(request, body.model)
        context, chat = chosen.max_model_len(), body.chat
        if chat.thinking_token_budget is not None and not can_bound_thinking(chosen.model.messages):
            # Clients send it to every model.
            chat = chat.model_copy(update={"thinking_token_budget": None})
            request[IGNORED_FIELDS] = (*request[IGNORED_FIELDS], THINKING_BUDGET)
        generation = await chat_request(
            chat, chosen.model, ids, context, endpoint=MESSAGES, default_max_tokens=body.max_tokens
        )
        [only] = generation.generations
        is_cut = only.sampling.max_tokens < body.max_tokens and len(only.prompt) + only.sampling.max_tokens >= context
        reason: StopReason = "model_context_window_exceeded" if is_cut else "max_tokens"
        fields = request_fields(omits_thinking=body.omits_thinking, length_reason=reason)
        return replace(generation, request_fields=fields)

    def _formatter(self, generation: GenerationRequest, ids: EventIds | None) -> Formatter:
        return MessageFormatter(generation, self._signer, ids)

    async def _count_tokens(self, request: web.Request) -> web.Response:
        body = await read_body(request, ConversationBody, self._responder.intake)
        with in_own_words():
            model = self._responder.backend(request, body.model).model
            count: TokenCount = {"input_tokens": await count_chat(body.chat, model)}
        return web.Response(body=to_json(count), content_type="application/json")


async def add_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """Repeats the request's id where Anthropic's clients look for it."""
    if request.path.startswith(MESSAGES.name) and REQUEST_ID_HEADER in response.headers:
        response.headers[_REQUEST_ID] = response.headers[REQUEST_ID_HEADER]
