"""All endpoints that have workers compute, and the one where streams are resumed."""

from __future__ import annotations

from aiohttp import web

from router_svc.api.anthropic.messages_api import MessagesApi
from router_svc.api.decisions.decisions_api import DecisionsApi
from router_svc.api.ollama.embeddings_api import OllamaEmbeddingsApi
from router_svc.api.ollama.generation_api import OllamaApi
from router_svc.api.openai.generation_api import GenerationApi
from router_svc.api.openai.resume_api import ResumeApi
from router_svc.api.pooling.embeddings_api import EmbeddingsApi
from router_svc.api.pooling.scores_api import ScoresApi
from router_svc.api.responder import Responder
from router_svc.api.responses.api import ResponsesApi
from router_svc.api.responses.backend import ResponsesBackend
from router_svc.api.responses.stored_api import StoredResponsesApi


def generating_routes(responder: Responder, responses: ResponsesBackend | None = None) -> list[web.RouteDef]:
    """The endpoints for the application. `responses`: where responses are stored; None: nowhere."""
    apis = (
        GenerationApi(responder),
        ResponsesApi(responder, responses),
        MessagesApi(responder),
        OllamaApi(responder),
    )
    routes = [*(route for api in apis for route in api.routes()), *StoredResponsesApi(responses).routes()]
    routes += [*EmbeddingsApi(responder).routes(), *ScoresApi(responder).routes(), *DecisionsApi(responder).routes()]
    routes += OllamaEmbeddingsApi(responder).routes()
    if responder.resuming is not None:
        formatters = {endpoint: formatter for api in apis for endpoint, formatter in api.formatters().items()}
        routes += ResumeApi(responder, responder.resuming, formatters).routes()
    return routes
