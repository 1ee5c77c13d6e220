"""The HTTP application: all routes, and the place where errors become responses."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

from aiohttp import web
from aiohttp.typedefs import Middleware

from pdserve.base.audit import Refusals
from pdserve.base.errors import PdserveError, RequestError
from pdserve.base.logs import get_logger
from pdserve.base.tracing.spans import NO_TRACER, Tracer
from router_svc.api.http_request import IDS, REQUEST_ID_HEADER, caller_of
from router_svc.api.openai.errors import error_response, from_http_exception
from router_svc.api.request_span import http_tracing

log = get_logger(__name__)


def make_app(
    routes: Iterable[Iterable[web.RouteDef]],
    *,
    max_body_bytes: int,
    refusals: Refusals | None = None,
    tracer: Tracer = NO_TRACER,
) -> web.Application:
    """The application with the given groups of routes."""
    app = web.Application(
        middlewares=[http_tracing(tracer), _errors(refusals or Refusals())], client_max_size=max_body_bytes
    )
    for group in routes:
        app.add_routes(group)
    return app


def _errors(refusals: Refusals) -> Middleware:
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
            response = error_response(error)
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
