"""The HTTP application: all routes, and the place where errors become responses."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

from aiohttp import web

from pdserve.base.errors import PdserveError, RequestError
from pdserve.base.logs import get_logger
from pdserve.base.tracing import NO_TRACER, Tracer
from router_svc.api.http_request import IDS, REQUEST_ID_HEADER
from router_svc.api.openai.errors import error_response, from_http_exception
from router_svc.api.request_span import http_tracing

log = get_logger(__name__)


def make_app(
    routes: Iterable[Iterable[web.RouteDef]], *, max_body_bytes: int, tracer: Tracer = NO_TRACER
) -> web.Application:
    """The application with the given groups of routes."""
    app = web.Application(middlewares=[http_tracing(tracer), _errors], client_max_size=max_body_bytes)
    for group in routes:
        app.add_routes(group)
    return app


@web.middleware
async def _errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        response = await handler(request)
    except PdserveError as error:
        response = error_response(error)
    except web.HTTPException as error:
        response = error_response(from_http_exception(error, request))
    except web.RequestPayloadError as error:
        response = error_response(
            RequestError(f"The request body cannot be decoded: {str(error)[:100]}. Send plain JSON.")
        )
    except ConnectionError:
        # The client disconnected during the response: there is no one left to answer.
        log.debug("client_gone", path=request.path)
        raise
    except Exception as error:  # noqa: BLE001 - the error boundary of the process: logged, and reported to the client
        log.error("handler_broke", exc=error, path=request.path)
        response = error_response(PdserveError("The router failed unexpectedly. Its log has the traceback."))
    ids = request.get(IDS)
    if ids is not None and not response.prepared:
        response.headers[REQUEST_ID_HEADER] = ids.header
    return response
