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
from router_svc.api.generations import MESSAGES, GenerationFactory
from router_svc.api.http_request import REQUEST_ID_HEADER, read_body
from router_svc.api.json_pieces import to_json
from router_svc.api.models import ModelBackend, Models
from router_svc.api.openai.chat_prompt import count_chat
from router_svc.api.openai.generation_request import GenerationRequest, chat_request
from router_svc.api.responder import GeneratingEndpoint, Responder
from router_svc.api.thinking_budget import can_bound_thinking
from router_svc.request.client import Client

#: The header in which Anthropic's clients look for the request's id.
_REQUEST_ID = "request-id"


class MessagesApi:
    """/v1/messages and /v1/messages/count_tokens."""

    def __init__(self, responder: Responder) -> None:
        self._responder = responder
        self._signer = Signer(responder.secret)

    @property
    def message(self) -> GeneratingEndpoint[MessagesBody]:
        """/v1/messages."""
        return GeneratingEndpoint(
            endpoint=MESSAGES,
            id_prefix=ID_PREFIX,
            body=MessagesBody,
            make=_message_request,
            formatter=lambda responder: self._formatter,
            choose=_chosen,
        )

    def routes(self) -> list[web.RouteDef]:
        """The endpoints for the application."""
        return [self._responder.route(self.message), web.post("/v1/messages/count_tokens", self._count_tokens)]

    def _formatter(self, generation: GenerationRequest, ids: EventIds | None) -> Formatter:
        return MessageFormatter(generation, self._signer, ids)

    async def _count_tokens(self, request: web.Request) -> web.Response:
        body = await read_body(request, ConversationBody, self._responder.intake)
        with in_own_words():
            model = self._responder.backend(request, body.model).model
            count: TokenCount = {"input_tokens": await count_chat(body.chat, model)}
        return web.Response(body=to_json(count), content_type="application/json")


def _chosen(name: str | None, models: Models, client: Client) -> ModelBackend:
    with in_own_words():
        return models.chosen(name, client)


async def _message_request(body: MessagesBody, factory: GenerationFactory) -> GenerationRequest:
    """The generation of a message, which has fewer tokens than requested if the context ends before."""
    chat = body.chat
    if chat.thinking_token_budget is not None and not can_bound_thinking(factory.model.messages):
        # Clients send a budget to every model.
        chat = chat.model_copy(update={"thinking_token_budget": None})
        factory.ignored_fields.append(THINKING_BUDGET)
    with in_own_words():
        generation = await chat_request(chat, factory, default_max_tokens=body.max_tokens)
    [only] = generation.generations
    fills_context = len(only.prompt) + only.sampling.max_tokens >= factory.max_model_len
    is_cut = only.sampling.max_tokens < body.max_tokens and fills_context
    reason: StopReason = "model_context_window_exceeded" if is_cut else "max_tokens"
    fields = request_fields(omits_thinking=body.omits_thinking, length_reason=reason)
    return replace(generation, request_fields=fields)


async def add_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """Repeats the request's id where Anthropic's clients look for it."""
    if request.path.startswith(MESSAGES.name) and REQUEST_ID_HEADER in response.headers:
        response.headers[_REQUEST_ID] = response.headers[REQUEST_ID_HEADER]
