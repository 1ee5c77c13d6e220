"""The HTTP application: all routes, and the one place where errors become answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

from aiohttp import web

from pdserve.base.errors import PdserveError, RequestError
from pdserve.base.logs import get_logger
from router_svc.api.openai.errors import error_response, from_http_exception
from router_svc.api.openai.generation_api import IDS, REQUEST_ID_HEADER

log = get_logger(__name__)


def make_app(routes: Iterable[Iterable[web.RouteDef]], *, max_body_bytes: int) -> web.Application:
    """The application with these routes."""
    app = web.Application(middlewares=[_errors], client_max_size=max_body_bytes)
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
        response = error_response(RequestError(f"The request body cannot be decoded: {str(error)[:100]}."))
    except ConnectionError:
        # The client went away while it was written to; there is nobody left to answer.
        log.debug("client_gone", path=request.path)
        raise
    except Exception as error:  # noqa: BLE001 - the border of the process: logged, and told to the caller
        log.error("handler_broke", exc=error, path=request.path)
        response = error_response(PdserveError("The router failed unexpectedly; its log has the traceback."))
    ids = request.get(IDS)
    if ids is not None and not response.prepared:
        response.headers[REQUEST_ID_HEADER] = ids.header
    return response
