"""/v1/files: uploading, listing, reading and deleting. Clients have their tenant's files only."""

from __future__ import annotations

import asyncio
import re

from aiohttp import web

from pdserve.base.errors import NotFound, PdserveError, RequestError
from pdserve.base.logs import get_logger
from router_svc.api.authentication import client_of
from router_svc.api.files.answers import file_object
from router_svc.api.files.stored_files import MAX_FILES, StoredFiles
from router_svc.api.files.upload import receive_file
from router_svc.api.intake import Intake
from router_svc.api.pages import integer, order, page_object, page_of
from router_svc.request.stream import WRITE_TIMEOUT_S
from router_svc.state.file_record import FileRecord

log = get_logger(__name__)

#: OpenAI's bound, which clients may send.
MAX_LIMIT = 10_000
FILE_ID = r"^file-[0-9a-f]{32}$"
_FILE_ID = re.compile(FILE_ID)


class FilesApi:
    """The endpoints of files."""

    def __init__(self, files: StoredFiles | None, intake: Intake, *, max_bytes: int) -> None:
        """`files` None: no files are stored, and every answer says so. `max_bytes`: of one file."""
        self._files_or_none = files
        self._intake = intake
        self._max_bytes = max_bytes

    @property
    def _files(self) -> StoredFiles:
        if self._files_or_none is None:
            raise NotFound("This server stores no files. Start its routers with --state-url.")
        return self._files_or_none

    def routes(self) -> list[web.RouteDef]:
        """The endpoints for the application."""
        return [
            web.post("/v1/files", self._upload),
            web.get("/v1/files", self._list),
            web.get("/v1/files/{id}", self._get),
            web.delete("/v1/files/{id}", self._delete),
            web.get("/v1/files/{id}/content", self._content),
        ]

    async def _upload(self, request: web.Request) -> web.Response:
        tenant = client_of(request).tenant
        record = await receive_file(request, self._files, self._intake, tenant, max_bytes=self._max_bytes)
        return web.json_response(file_object(record))

    async def _list(self, request: web.Request) -> web.Response:
        limit = integer(request, "limit", MAX_FILES, at_least=1, at_most=MAX_LIMIT)
        direction, purpose = order(request), request.query.get("purpose")
        files = [
            each
            for each in await self._files.all_of(client_of(request).tenant)
            if purpose is None or each.purpose == purpose
        ]
        if direction == "asc":
            files.reverse()
        ids = [each.id for each in files]
        shown, has_more = page_of(files, ids, after=request.query.get("after"), limit=limit)
        return web.json_response(page_object([file_object(each) for each in shown], has_more=has_more))

    async def _get(self, request: web.Request) -> web.Response:
        return web.json_response(file_object(await self._find(request)))

    async def _delete(self, request: web.Request) -> web.Response:
        record = await self._find(request)
        await self._files.delete(record)
        return web.json_response({"id": record.id, "object": "file", "deleted": True})

    async def _content(self, request: web.Request) -> web.StreamResponse:
        record = await self._find(request)
        response = web.StreamResponse(headers={"Content-Disposition": "attachment"})
        response.content_type = "application/octet-stream"
        response.content_length = record.num_bytes
        try:
            async for chunk in self._files.content(record):
                async with asyncio.timeout(WRITE_TIMEOUT_S):
                    await response.prepare(request)
                    await response.write(chunk)
        except TimeoutError:
            raise ConnectionResetError(f"the client has read nothing for {WRITE_TIMEOUT_S:g} s") from None
        except PdserveError as error:
            if not response.prepared:
                raise
            log.warning("file_broke_off", id=record.id, reason=error)
            raise ConnectionResetError("the rest of the file cannot be read") from error
        return response

    async def _find(self, request: web.Request) -> FileRecord:
        file_id = request.match_info["id"]
        if not _FILE_ID.fullmatch(file_id):
            raise RequestError("The id is not that of a file. Send the `id` of an answer of /v1/files.", param="id")
        return await self._files.find(client_of(request).tenant, file_id)
