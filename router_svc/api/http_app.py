"""The HTTP application: all routes, and the place where errors become responses."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from aiohttp import web
from aiohttp.typedefs import Middleware

from pdserve.base.errors import PdserveError, RequestError
from pdserve.base.logs import get_logger
from pdserve.net.hosts import AllowedHosts
from pdserve.net.http_limits import bounded_headers
from pdserve.observe.audit import Refusals
from pdserve.observe.tracing.spans import NO_TRACER, Tracer
from router_svc.api.authentication import LimitHeaders, add_limit_headers, authentication, no_limit_headers
from router_svc.api.guards import add_cross_origin, known_hosts
from router_svc.api.http_request import IDS, REQUEST_ID_HEADER, add_ignored_fields, caller_of
from router_svc.api.openai.errors import error_response, from_http_exception
from router_svc.api.request_span import http_tracing
from router_svc.clients.access import Access
from router_svc.request.stream import WRITE_TIMEOUT_S

log = get_logger(__name__)

#: Makes the response to a request that has failed.
ErrorForm = Callable[[PdserveError, web.Request], web.Response]


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpRules:
    """What a listener takes, from whom, and how long it waits for readers."""

    max_body_bytes: int
    hosts: AllowedHosts = field(default_factory=AllowedHosts)
    #: Origins of the web pages that may call it.
    origins: Collection[str] = ()
    access: Access = field(default_factory=Access)
    #: What a client has left of its limits.
    limit_headers: LimitHeaders = no_limit_headers
    write_timeout_s: float = WRITE_TIMEOUT_S
    #: The form of errors by the start of the path, where it is not OpenAI's.
    error_forms: Mapping[str, ErrorForm] = field(default_factory=dict)


def make_app(
    routes: Iterable[Iterable[web.AbstractRouteDef]],
    rules: HttpRules,
    *,
    refusals: Refusals | None = None,
    tracer: Tracer = NO_TRACER,
) -> web.Application:
    """The application with the given groups of routes."""
    errors = _errors(refusals or Refusals(), rules.error_forms)
    app = web.Application(
        middlewares=[
            http_tracing(tracer),
            _deadline(rules.write_timeout_s),
            errors,
            bounded_headers,
            known_hosts(rules.hosts),
        ],
        client_max_size=rules.max_body_bytes,
    )
    add_cross_origin(app, rules.origins)
    app.middlewares.append(authentication(rules.access))
    add_limit_headers(app, rules.limit_headers)
    add_ignored_fields(app)
    for group in routes:
        app.add_routes(group)
    return app


def _deadline(write_timeout_s: float) -> Middleware:
    """A middleware that sends whole responses, and disconnects a client that does not read one in time."""

    @web.middleware
    async def sent(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if request.transport is not None:
            # A write is complete when the kernel has it. With a buffer in between, its rest would have no deadline.
            request.transport.set_write_buffer_limits(high=0)
        try:
            response = await handler(request)
            async with asyncio.timeout(write_timeout_s):
                await response.prepare(request)
                await response.write_eof()
        except TimeoutError:
            log.info("client_reads_nothing", path=request.path, after_s=write_timeout_s)
            _disconnect(request)
            raise ConnectionResetError(f"the client has read nothing for {write_timeout_s:g} s") from None
        except ConnectionError:
            _disconnect(request)
            raise
        return response

    return sent


def _disconnect(request: web.Request) -> None:
    """Drops the connection. Closing it would wait until the client has taken what is buffered."""
    if request.transport is not None:
        request.transport.abort()


def _errors(refusals: Refusals, forms: Mapping[str, ErrorForm]) -> Middleware:
    """A middleware that makes responses of errors, and reports those that refuse a request."""

    @web.middleware
    async def answered(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        try:
            response = await handler(request)
        except ConnectionError:
            # The client disconnected during the response: there is no one left to answer.
            log.debug("client_gone", path=request.path)
            raise
        except Exception as raised:  # noqa: BLE001 - the error boundary of the process: reported to the client
            error = _as_ours(raised, request)
            refusals.refused(error, caller_of(request))
            form = next((form for start, form in forms.items() if request.path.startswith(start)), None)
            response = error_response(error) if form is None else form(error, request)
        ids = request.get(IDS)
        if ids is not None and not response.prepared:
            response.headers[REQUEST_ID_HEADER] = ids.header
        return response

    return answered


def _as_ours(error: Exception, request: web.Request) -> PdserveError:
    """The error for the client. One that is not expected is logged."""
    match error:
        case PdserveError():
            return error
        case web.HTTPException():
            return from_http_exception(error, request)
        case web.RequestPayloadError():
            return RequestError(f"The request body cannot be decoded: {str(error)[:100]}. Send plain JSON.")
    log.error("handler_broke", exc=error, path=request.path)
    return PdserveError("The router failed unexpectedly. Its log has the traceback.")
