"""The router's HTTP listeners: the API's, and with `--admin-port` one of its own for what operators read."""

from __future__ import annotations

import socket
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass

from aiohttp import web
from prometheus_client import CollectorRegistry

from pdserve.base.errors import NotFound
from pdserve.net.admin import Health, bound_socket, metrics_routes, probe_routes, serve_http
from pdserve.net.hosts import AllowedHosts
from pdserve.observe.audit import Refusals
from pdserve.observe.tracing.spans import NO_TRACER, Tracer
from router_svc.api.anthropic import errors as anthropic_errors
from router_svc.api.anthropic.messages_api import add_request_id
from router_svc.api.authentication import LimitHeaders, no_limit_headers
from router_svc.api.batches.batches_api import BatchesApi
from router_svc.api.cancel_api import CancelApi
from router_svc.api.console.console import Console
from router_svc.api.files.files_api import FilesApi
from router_svc.api.generating import generating_routes
from router_svc.api.generations import MESSAGES
from router_svc.api.http_app import HttpRules, make_app
from router_svc.api.ollama import errors as ollama_errors
from router_svc.api.ollama.model_api import OllamaModelApi
from router_svc.api.openai.errors import error_response
from router_svc.api.openai.info import ModelApi, OperatorApi
from router_svc.api.reference.page import Reference
from router_svc.api.responder import Responder
from router_svc.api.responses.backend import ResponsesBackend
from router_svc.api.usage_api import UsageApi
from router_svc.clients.access import Access
from router_svc.clients.tls import ClientTls
from router_svc.config import RouterConfig

Routes = Sequence[web.AbstractRouteDef]


@dataclass(frozen=True, slots=True, kw_only=True)
class Addresses:
    """Addresses of the router's APIs, as host:port."""

    http: str
    grpc: str
    #: None: the API's port serves operators, too.
    admin: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Front:
    """Everything that answers over HTTP."""

    config: RouterConfig
    responder: Responder
    #: Where responses are stored; None: nowhere.
    responses: ResponsesBackend | None
    files: FilesApi
    batches: BatchesApi
    model: ModelApi
    ollama: OllamaModelApi
    operator: OperatorApi
    cancel: CancelApi
    usage: UsageApi
    #: None: the router has no console.
    console: Console | None
    health: Health
    registry: CollectorRegistry
    access: Access
    limit_headers: LimitHeaders = no_limit_headers
    tls: ClientTls | None = None
    refusals: Refusals
    tracer: Tracer = NO_TRACER

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[tuple[str, str | None]]:
        """Serves until the block ends. Yields `host:port` of the API, and of the admin port if there is one."""
        config, context = self.config, None if self.tls is None else self.tls.context
        async with AsyncExitStack() as stack:
            admin_address = None
            if config.admin_port is not None:
                admin_host = config.admin_host or config.host
                listener = stack.enter_context(
                    closing(bound_socket(admin_host, config.admin_port, flag="--admin-port"))
                )
                app = self._app(admin_host, [*self._client_routes(), *self._operator_routes()])
                self._watch_end(app)
                admin_address = await stack.enter_async_context(_served(app, listener, context))
            listener = stack.enter_context(closing(bound_socket(config.host, config.port, flag="--port")))
            yield await stack.enter_async_context(_served(self._public_app(), listener, context)), admin_address

    def _public_app(self) -> web.Application:
        if self.config.admin_port is not None:
            elsewhere = [_elsewhere(route) for route in self._operator_routes() if isinstance(route, web.RouteDef)]
            return self._app(self.config.host, self._client_routes(), elsewhere)
        app = self._app(self.config.host, [*self._client_routes(), *self._operator_routes()])
        self._watch_end(app)
        return app

    def _app(self, host: str, routes: Routes, elsewhere: Routes = ()) -> web.Application:
        """An application with these routes, a reference of them, and answers where others are."""
        reference = Reference(self.config.max_request_timeout_s)
        routes = [*routes, *reference.routes()]
        reference.describe(routes)
        rules = HttpRules(
            max_body_bytes=self.config.max_body,
            hosts=AllowedHosts.of_listener(host, self.config.allowed_hosts),
            origins=self.config.allowed_origins,
            access=self.access,
            limit_headers=self.limit_headers,
            error_forms={
                MESSAGES.name: anthropic_errors.error_response,
                ollama_errors.PATHS: ollama_errors.error_response,
            },
        )
        app = make_app([routes, elsewhere], rules, refusals=self.refusals, tracer=self.tracer)
        app.on_response_prepare.append(add_request_id)
        return app

    def _client_routes(self) -> Routes:
        routes = generating_routes(self.responder, self.responses)
        for api in (self.files, self.batches, self.cancel, self.model, self.ollama, self.usage):
            routes += api.routes()
        return [*routes, *probe_routes(self.health)]

    def _operator_routes(self) -> Routes:
        console = [] if self.console is None else self.console.routes()
        return [*self.operator.routes(), *metrics_routes(self.registry), *console]

    def _watch_end(self, app: web.Application) -> None:
        if self.console is not None:
            # Its streams end when the application shuts down, which would wait for them.
            app.on_shutdown.append(self.console.close)


def _served(
    app: web.Application, listener: socket.socket, tls: ssl.SSLContext | None
) -> AbstractAsyncContextManager[str]:
    """A listener whose errors are OpenAI's from the first byte on."""
    return serve_http(app, listener, tls=tls, unreadable=error_response)


def _elsewhere(route: web.RouteDef) -> web.RouteDef:
    """The same path, answered with where it is."""

    async def answer(request: web.Request) -> web.StreamResponse:
        raise NotFound(f"{request.path[:100]} is served on this router's admin port only (--admin-port). Ask there.")

    return web.RouteDef(route.method, route.path, answer, {})
