"""The answers of /v1/files, in OpenAI's form."""

from __future__ import annotations

from typing import Literal

from typing_extensions import TypedDict

from router_svc.state.file_record import FileRecord


class FileObject(TypedDict):
    """A file. Times are in seconds of Unix time."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: Literal["processed"]


class FileList(TypedDict):
    """Files, in pages."""

    object: Literal["list"]
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(TypedDict):
    """A file that is gone."""

    id: str
    object: Literal["file"]
    deleted: Literal[True]


def file_object(record: FileRecord) -> FileObject:
    """A file as clients get it."""
    return {
        "id": record.id,
        "object": "file",
        "bytes": record.num_bytes,
        "created_at": record.created_at,
        "expires_at": record.expires_at,
        "filename": record.filename,
        "purpose": record.purpose,
        "status": "processed",
    }
