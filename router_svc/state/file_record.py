"""One file as it is stored: a record of its own, and its content in chunks, which are records, too."""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import asdict, dataclass, field

from pdserve.base.errors import Unreadable
from router_svc.state.response_record import tenant_name

#: Bytes of a chunk, but for the last one of a file.
CHUNK_BYTES = 1 << 20


@dataclass(slots=True)
class Content:
    """What a file has: the ids of its chunks in order, and their bytes."""

    chunks: list[str] = field(default_factory=list)
    num_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """A stored file."""

    id: str
    #: Whose it is.
    tenant: str
    filename: str
    #: What it is for: `batch`, or `batch_output`.
    purpose: str
    created_at: int
    expires_at: int
    num_bytes: int
    chunks: list[str]

    def to_bytes(self) -> bytes:
        """The record as JSON."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> FileRecord:
        """The record of its JSON. Raises `Unreadable`."""
        try:
            return cls(**json.loads(data))
        except (ValueError, TypeError) as error:
            raise Unreadable(f"The stored file cannot be read: {error!r:.200}.") from error


def files_group(tenant: str) -> str:
    """The group of a tenant's files, which is listed."""
    return f"{tenant_name(tenant)}-files"


def file_key(tenant: str, file_id: str) -> str:
    """The key of a file's record."""
    return f"{files_group(tenant)}:{file_id}"


def chunk_key(tenant: str, chunk_id: str) -> str:
    """The key of a chunk."""
    return f"{tenant_name(tenant)}-chunks:{chunk_id}"


def new_id(prefix: str) -> str:
    """An id that is larger, as a text, than those made in earlier milliseconds."""
    return f"{prefix}{time.time_ns() // 1_000_000:012x}{secrets.token_hex(10)}"
