"""Reads a file that a client uploads, without holding it in memory."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import TypeVar

from aiohttp import BodyPartReader, hdrs, web

from pdserve.base.errors import Forbidden, PayloadTooLarge, RequestError, StoreError, UnsupportedMediaType
from router_svc.api.files.stored_files import ChunkWriter, StoredFiles
from router_svc.api.intake import Intake
from router_svc.state.file_record import CHUNK_BYTES, FileRecord, new_id

T = TypeVar("T")

BATCH = "batch"
#: Time that an upload may take, and time without a byte of it.
_UPLOAD_TIMEOUT_S = 3600.0
_IDLE_TIMEOUT_S = 60.0
_MAX_FIELD_BYTES = 256
_MAX_FIELDS = 8
_MAX_NAME_CHARACTERS = 255
_PIECE_BYTES = 1 << 16


@dataclass(slots=True)
class _Form:
    """What has come of the form."""

    writer: ChunkWriter
    max_bytes: int
    fields: dict[str, str] = field(default_factory=dict)
    filename: str | None = None


async def receive_file(
    request: web.Request, files: StoredFiles, intake: Intake, tenant: str, *, max_bytes: int
) -> FileRecord:
    """Stores the file of a form with the fields `file` and `purpose`.

    What was stored of a form that is wrong or breaks off is deleted. Raises `RequestError`, `StoreError`, and
    `Overloaded` when there is no room for uploads.
    """
    _require_form(request)
    await files.require_room(tenant)
    form = _Form(ChunkWriter(files, tenant), max_bytes)
    with intake.hold() as hold:
        # What an upload has in memory at any time, whatever the size of its file.
        hold.add(CHUNK_BYTES)
        try:
            async with asyncio.timeout(_UPLOAD_TIMEOUT_S):
                await _read_form(request, form)
            _check(form)
            record = await form.writer.create(new_id("file-"), form.filename or "", BATCH)
        except BaseException as error:
            with contextlib.suppress(StoreError):
                await form.writer.discard()
            if isinstance(error, TimeoutError):
                raise RequestError("The file did not arrive in time. Send it faster, or send less.") from None
            raise
    return record


def _require_form(request: web.Request) -> None:
    if hdrs.ORIGIN in request.headers:
        # Any web page may send a form without asking.
        raise Forbidden("Files are not taken from web pages. Upload them from a program.")
    if request.content_type != "multipart/form-data":
        raise UnsupportedMediaType("A file is uploaded as multipart/form-data, with the fields `purpose` and `file`.")


async def _read_form(request: web.Request, form: _Form) -> None:
    try:
        reader = await request.multipart()
        for _ in range(_MAX_FIELDS):
            piece = await _in_time(reader.next())
            if piece is None:
                return
            if not isinstance(piece, BodyPartReader):
                raise RequestError("The form has a form within it. Send the fields `purpose` and `file`.")
            await _read_field(piece, form)
    except ValueError as error:
        raise RequestError(f"The form cannot be read: {str(error)[:200]}. Send it as multipart/form-data.") from None
    raise RequestError(f"The form has more than {_MAX_FIELDS} fields. Send `purpose` and `file`.")


async def _read_field(piece: BodyPartReader, form: _Form) -> None:
    if hdrs.CONTENT_ENCODING in piece.headers or hdrs.CONTENT_TRANSFER_ENCODING in piece.headers:
        raise RequestError("A field of the form is encoded. Send it as it is.")
    if piece.name == "file":
        if form.filename is not None:
            raise RequestError("The form has several files. Send one at a time.", param="file")
        form.filename = (piece.filename or "file")[:_MAX_NAME_CHARACTERS]
        while data := await _in_time(piece.read_chunk(_PIECE_BYTES)):
            if form.writer.content.num_bytes + len(data) > form.max_bytes:
                raise PayloadTooLarge(f"The file exceeds the limit of {form.max_bytes} bytes (--max-file). Divide it.")
            await form.writer.add(data)
        return
    name = (piece.name or "")[:100]
    text = await _in_time(piece.read_chunk(_MAX_FIELD_BYTES))
    if await _in_time(piece.read_chunk(_MAX_FIELD_BYTES)):
        raise RequestError(f"`{name}` has more than {_MAX_FIELD_BYTES} bytes. Shorten it.", param=name)
    form.fields[name] = text.decode("utf-8", "replace")


def _check(form: _Form) -> None:
    """Raises `RequestError` for a form that is not what is taken."""
    for name in form.fields:
        if name != "purpose":
            raise RequestError(
                f"`{name}` is not supported. Files are kept for the time of --state-ttl-s; delete them before.",
                param=name,
            )
    if (purpose := form.fields.get("purpose")) != BATCH:
        raise RequestError(f"`purpose` is {purpose!r}, but must be {BATCH!r}.", param="purpose")
    if form.filename is None:
        raise RequestError("The form has no file. Send one in the field `file`.", param="file")
    if not form.writer.content.num_bytes:
        raise RequestError("The file is empty.", param="file")


async def _in_time(reading: Awaitable[T]) -> T:
    async with asyncio.timeout(_IDLE_TIMEOUT_S):
        return await reading
