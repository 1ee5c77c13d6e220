"""All endpoints that have workers compute, and the one where streams are resumed."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from router_svc.api.anthropic.messages_api import MessagesApi
from router_svc.api.decisions.decisions_api import DecisionsApi
from router_svc.api.ollama.embeddings_api import OllamaEmbeddingsApi
from router_svc.api.ollama.generation_api import OLLAMA_CHAT_ENDPOINT, OLLAMA_GENERATE_ENDPOINT
from router_svc.api.openai.generation_api import CHAT_COMPLETION, COMPLETION
from router_svc.api.openai.resume_api import ResumeApi
from router_svc.api.pooling.embeddings_api import EmbeddingsApi
from router_svc.api.pooling.scores_api import ScoresApi
from router_svc.api.responder import GeneratingEndpoint, Responder
from router_svc.api.responses.api import ResponsesApi
from router_svc.api.responses.backend import ResponsesBackend
from router_svc.api.responses.stored_api import StoredResponsesApi


def generating_routes(responder: Responder, responses: ResponsesBackend | None = None) -> list[web.RouteDef]:
    """The endpoints for the application. `responses`: where responses are stored; None: nowhere."""
    messages, made = MessagesApi(responder), ResponsesApi(responder, responses)
    rows: tuple[GeneratingEndpoint[Any], ...] = (
        COMPLETION,
        CHAT_COMPLETION,
        OLLAMA_CHAT_ENDPOINT,
        OLLAMA_GENERATE_ENDPOINT,
    )
    routes = [responder.route(row) for row in rows]
    routes += [*made.routes(), *messages.routes(), *StoredResponsesApi(responses).routes()]
    routes += [*EmbeddingsApi(responder).routes(), *ScoresApi(responder).routes(), *DecisionsApi(responder).routes()]
    routes += OllamaEmbeddingsApi(responder).routes()
    if responder.resuming is not None:
        resumable: tuple[GeneratingEndpoint[Any], ...] = (COMPLETION, CHAT_COMPLETION, messages.message)
        formatters = {row.endpoint.name: row.formatter(responder) for row in resumable} | made.formatters()
        routes += ResumeApi(responder, responder.resuming, formatters).routes()
    return routes
