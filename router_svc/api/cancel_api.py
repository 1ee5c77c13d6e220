"""The endpoint that ends a request by its id."""

from __future__ import annotations

from typing import Literal

from aiohttp import hdrs, web
from typing_extensions import TypedDict

from pdserve.base.errors import NotFound, RequestError
from router_svc.api.authentication import scope_of
from router_svc.api.http_request import require_json
from router_svc.api.ids import is_traceable_id
from router_svc.records.request_state import RequestState
from router_svc.records.traces import Traces
from router_svc.request.cancels import Cancels


class Cancellation(TypedDict):
    """What has become of the request. All but `cancelled`: it had ended before."""

    id: str
    status: Literal["cancelled", "finished", "failed"]


class CancelApi:
    """/v1/requests/{id}/cancel."""

    def __init__(self, cancels: Cancels, traces: Traces) -> None:
        self._cancels = cancels
        self._traces = traces

    def routes(self) -> list[web.RouteDef]:
        """The endpoint for the application."""
        return [web.post("/v1/requests/{id}/cancel", self._cancel)]

    async def _cancel(self, request: web.Request) -> web.Response:
        if hdrs.ORIGIN in request.headers:
            # Without a type, any web page may send this without asking.
            require_json(request)
        return web.json_response(await self.cancelled(request.match_info["id"], scope_of(request)))

    async def cancelled(self, request_id: str, tenant: str | None) -> Cancellation:
        """Cancels a request of the tenant; None: of any. Raises `NotFound`, `RequestError` and `StoreError`."""
        if not is_traceable_id(request_id):
            raise RequestError(
                "The id is not valid. Send the `id` of an answer, or its X-Request-Id: letters, digits, '.', '_' and "
                "'-', at most 128.",
                param="id",
            )
        if await self._cancels.cancel(request_id, tenant):
            return {"id": request_id, "status": "cancelled"}
        record = await self._traces.get(request_id, tenant=tenant)
        match None if record is None else record["state"]:
            case RequestState.FINISHED:
                return {"id": request_id, "status": "finished"}
            case RequestState.FAILED:
                return {"id": request_id, "status": "failed"}
            case RequestState.CANCELLED:
                return {"id": request_id, "status": "cancelled"}
        # A request of another tenant gives the same error.
        raise NotFound(f"Request {request_id} is unknown: no router that answers is running it.")
