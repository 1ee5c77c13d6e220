"""/v1/batches: making, listing, reading and cancelling. Clients have their tenant's batches only."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from typing import Annotated, Literal

from aiohttp import hdrs, web
from annotated_types import MaxLen
from pydantic import StringConstraints

from pdserve.base.errors import CapacityError, NotFound, RequestError, StaleError
from router_svc.api.authentication import client_of
from router_svc.api.batches.answers import batch_object
from router_svc.api.batches.backend import BatchesBackend
from router_svc.api.batches.batch_runs import BatchRuns
from router_svc.api.batches.stored_batches import StoredBatches
from router_svc.api.body import Body
from router_svc.api.files.files_api import FILE_ID
from router_svc.api.http_request import read_body, require_json
from router_svc.api.intake import Intake
from router_svc.api.pages import integer, page_object, page_of
from router_svc.api.responses.schema import MAX_METADATA
from router_svc.request.cancels import Cancels
from router_svc.state.batch_record import BatchRecord
from router_svc.state.file_record import new_id

BATCH_ID = r"^batch_[0-9a-f]{32}$"
MAX_LIMIT = 100
DEFAULT_LIMIT = 20
_BATCH_ID = re.compile(BATCH_ID)
_WINDOW_S = 86_400
#: Time in which a batch that was cancelled ends.
_CANCEL_S = 10.0


class BatchBody(Body):
    """POST /v1/batches."""

    input_file_id: Annotated[str, StringConstraints(pattern=FILE_ID)]
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses"]
    completion_window: Literal["24h"]
    metadata: Annotated[dict[Annotated[str, MaxLen(64)], Annotated[str, MaxLen(512)]], MaxLen(MAX_METADATA)] | None = (
        None
    )


class BatchesApi:
    """The endpoints of batches."""

    def __init__(self, backend: BatchesBackend | None, cancels: Cancels, intake: Intake) -> None:
        """`backend` None: no batches are stored, and every answer says so."""
        self._backend_or_none = backend
        self._cancels = cancels
        self._intake = intake

    @property
    def _backend(self) -> BatchesBackend:
        if self._backend_or_none is None:
            raise NotFound("This server stores no batches. Start its routers with --state-url.")
        return self._backend_or_none

    @property
    def _batches(self) -> StoredBatches:
        return self._backend.stored

    @property
    def _runs(self) -> BatchRuns:
        return self._backend.runs

    def routes(self) -> list[web.RouteDef]:
        """The endpoints for the application."""
        return [
            web.post("/v1/batches", self._create),
            web.get("/v1/batches", self._list),
            web.get("/v1/batches/{id}", self._get),
            web.post("/v1/batches/{id}/cancel", self._cancel),
        ]

    async def _create(self, request: web.Request) -> web.Response:
        batches = self._batches
        body = await read_body(request, BatchBody, self._intake)
        client = client_of(request)
        file = await batches.files.find(client.tenant, body.input_file_id)
        if file.purpose != "batch":
            raise RequestError("The file is the result of a batch, and no input of one.", param="input_file_id")
        now = int(time.time())
        record = BatchRecord(
            id=new_id("batch_"),
            tenant=client.tenant,
            key_id=client.id,
            endpoint=body.endpoint,
            input_file_id=file.id,
            output_file_id=new_id("file-"),
            error_file_id=new_id("file-"),
            metadata=body.metadata,
            created_at=now,
            expires_at=now + _WINDOW_S,
        )
        await self._runs.start(record)
        return web.json_response(batch_object(record))

    async def _list(self, request: web.Request) -> web.Response:
        limit = integer(request, "limit", DEFAULT_LIMIT, at_least=1, at_most=MAX_LIMIT)
        keys = await self._batches.keys_of(client_of(request).tenant)
        ids = [key.rpartition(":")[2] for key in keys]
        shown, has_more = page_of(keys, ids, after=request.query.get("after"), limit=limit)
        found = [await self._batches.read(key) for key in shown]
        objects = [batch_object(record) for record in found if record is not None]
        return web.json_response(page_object(objects, has_more=has_more))

    async def _get(self, request: web.Request) -> web.Response:
        return web.json_response(batch_object(await self._find(request)))

    async def _cancel(self, request: web.Request) -> web.Response:
        if hdrs.ORIGIN in request.headers:
            # Without a type, any web page may send this without asking.
            require_json(request)
        record = await self._find(request)
        if not record.is_terminal:
            await self._end(record)
            record = await self._find(request)
        return web.json_response(batch_object(record))

    async def _end(self, record: BatchRecord) -> None:
        """Cancels a batch, on whichever router it runs. Raises `CapacityError` if it goes on."""
        found: BatchRecord | None = record
        try:
            async with asyncio.timeout(_CANCEL_S):
                while found is not None and not found.is_terminal:
                    if await self._cancels.cancel(record.id, record.tenant):
                        await self._runs.wait_ended(record.key, wait_s=_CANCEL_S)
                    else:
                        with contextlib.suppress(StaleError):  # A router has claimed it meanwhile, or it has ended.
                            await self._runs.end_cancelled(record)
                    found = await self._batches.read(record.key)
        except TimeoutError:
            raise CapacityError("The router that runs the batch does not answer. Try again.") from None

    async def _find(self, request: web.Request) -> BatchRecord:
        batches, batch_id = self._batches, request.match_info["id"]
        if not _BATCH_ID.fullmatch(batch_id):
            raise RequestError("The id is not that of a batch. Send the `id` of an answer of /v1/batches.", param="id")
        return await batches.find(client_of(request).tenant, batch_id)
