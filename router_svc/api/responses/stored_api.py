"""/v1/responses/{id}: reading, following, cancelling and deleting what is stored. Clients have their tenant's only."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import hdrs, web

from pdserve.base.errors import CapacityError, NotFound, RequestError
from router_svc.api.authentication import client_of
from router_svc.api.http_request import IDS, require_json
from router_svc.api.ids import Ids, is_traceable_id
from router_svc.api.json_pieces import to_json
from router_svc.api.pages import integer, order, page_object, page_of
from router_svc.api.responses.backend import ResponsesBackend
from router_svc.api.responses.followed import send_events
from router_svc.api.responses.item_ids import item_id
from router_svc.state.response_record import ResponseRecord, record_key

MAX_LIMIT = 100
DEFAULT_LIMIT = 20
#: Time in which a response that was cancelled ends.
_CANCEL_S = 10.0


class StoredResponsesApi:
    """The endpoints of responses by their ids."""

    def __init__(self, backend: ResponsesBackend | None) -> None:
        """`backend` None: no responses are stored, and every answer says so."""
        self._backend_or_none = backend

    @property
    def _backend(self) -> ResponsesBackend:
        if self._backend_or_none is None:
            raise NotFound("This server stores no responses. Start its routers with --state-url.")
        return self._backend_or_none

    def routes(self) -> list[web.RouteDef]:
        """The endpoints for the application."""
        return [
            web.get("/v1/responses/{id}", self._get),
            web.delete("/v1/responses/{id}", self._delete),
            web.post("/v1/responses/{id}/cancel", self._cancel),
            web.get("/v1/responses/{id}/input_items", self._input_items),
        ]

    async def _get(self, request: web.Request) -> web.StreamResponse:
        record = await self._find(request)
        if request.query.get("stream") != "true":
            return response_of(record)
        if not record.request:
            raise RequestError("`stream` is for responses that run in the background. Leave it out.", param="stream")
        after = integer(request, "starting_after", -1, at_least=-1, at_most=2**53)
        ids = Ids(prefix="resp_", header=record.id.removeprefix("resp_"))
        request[IDS] = ids
        return await send_events(request, ids, self._backend.runs.follow(record, after))

    async def _delete(self, request: web.Request) -> web.Response:
        record = await self._find(request)
        if not record.is_terminal:
            await self._backend.cancels.cancel(record.id, record.tenant)
        # It stays deleted even if its stream is resumed later.
        await self._backend.stored.state.delete(record_key(record.tenant, record.id), for_good=True)
        return web.json_response({"id": record.id, "object": "response", "deleted": True})

    async def _cancel(self, request: web.Request) -> web.Response:
        if hdrs.ORIGIN in request.headers:
            # Without a type, any web page may send this without asking.
            require_json(request)
        record = await self._find(request)
        if not record.request:
            raise RequestError(
                "Only responses that run in the background are cancelled by their id. End the others with their "
                "connection.",
                param="id",
            )
        return response_of(await self._ended(request, record))

    async def _ended(self, request: web.Request, record: ResponseRecord) -> ResponseRecord:
        """Cancels a response, on whichever router it runs. Raises `CapacityError` if it goes on."""
        try:
            async with asyncio.timeout(_CANCEL_S):
                while not record.is_terminal:
                    if await self._backend.cancels.cancel(record.id, record.tenant):
                        async for _ in self._backend.runs.follow(record, -1):
                            pass
                    else:
                        await self._backend.runs.end_cancelled(record_key(record.tenant, record.id))
                    record = await self._find(request)
        except TimeoutError:
            raise CapacityError("The router that runs the response does not answer. Try again.") from None
        return record

    async def _input_items(self, request: web.Request) -> web.Response:
        record = await self._find(request)
        limit = integer(request, "limit", DEFAULT_LIMIT, at_least=1, at_most=MAX_LIMIT)
        items = [_with_id(item, record.id, index) for index, item in enumerate(record.items)]
        if order(request) == "desc":
            items.reverse()
        ids = [item["id"] for item in items]
        shown, has_more = page_of(items, ids, after=request.query.get("after"), limit=limit)
        return web.Response(body=to_json(page_object(shown, has_more=has_more)), content_type="application/json")

    async def _find(self, request: web.Request) -> ResponseRecord:
        response_id = request.match_info["id"]
        if not is_traceable_id(response_id):
            raise RequestError(
                "The id is not valid. Send the `id` of a response: letters, digits, '.', '_' and '-'.", param="id"
            )
        return await self._backend.stored.find(client_of(request).tenant, response_id)


def response_of(record: ResponseRecord) -> web.Response:
    """A stored response, as it is sent."""
    return web.Response(body=record.response.body, content_type="application/json")


def _with_id(item: dict[str, Any], response_id: str, index: int) -> dict[str, Any]:
    """The item as OpenAI shows it: with an id, and its text in a list."""
    shown = {"id": item_id(item["type"], response_id, index, is_input=True), **item}
    if item["type"] == "message" and isinstance(item["content"], str):
        kind = "output_text" if item["role"] == "assistant" else "input_text"
        shown["content"] = [{"type": kind, "text": item["content"]}]
        shown["status"] = "completed"
    return shown
