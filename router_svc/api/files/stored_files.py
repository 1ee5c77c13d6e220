"""The files of this cluster that are stored, by their owner and id."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Sequence

from pdserve.base.errors import NotFound, RequestError
from pdserve.peers.secret import ClusterSecret
from router_svc.records.stream_seal import StreamSeal
from router_svc.state.file_record import CHUNK_BYTES, Content, FileRecord, chunk_key, file_key, files_group
from router_svc.state.sealed import opened, sealed
from router_svc.state.state_store import StateStore

#: Files of one tenant at a time.
MAX_FILES = 1000


class StoredFiles:
    """Reads and writes files. Belongs to the event loop."""

    def __init__(self, state: StateStore, seal: StreamSeal, *, ttl_s: float) -> None:
        """`ttl_s`: time for which a file is kept."""
        self.state = state
        self.ttl_s = ttl_s
        self.seal = seal

    async def require_room(self, tenant: str) -> None:
        """Raises `RequestError` if the tenant has as many files as it may, and `StoreError`."""
        if len(await self.state.listed(files_group(tenant))) >= MAX_FILES:
            raise RequestError(f"There are {MAX_FILES} files already, which is the limit. Delete some.")
        await self.state.require_writable()

    async def create_of(
        self, content: Content, tenant: str, file_id: str, *, filename: str, purpose: str
    ) -> FileRecord:
        """Stores the record of a file whose chunks are stored, or replaces it. Raises `StoreError`."""
        now = int(time.time())
        record = FileRecord(
            id=file_id,
            tenant=tenant,
            filename=filename,
            purpose=purpose,
            created_at=now,
            expires_at=now + int(self.ttl_s),
            num_bytes=content.num_bytes,
            chunks=content.chunks,
        )
        key = file_key(tenant, file_id)
        data = await asyncio.to_thread(lambda: sealed(record.to_bytes(), key, self.seal))
        await self.state.create(key, data, is_listed=True)
        return record

    async def find(self, tenant: str, file_id: str) -> FileRecord:
        """The record. Raises `NotFound`, also for that of another tenant, and `StoreError`."""
        record = await self._read(file_key(tenant, file_id))
        if record is None:
            raise NotFound(f"There is no file `{file_id[:100]}`: it was deleted, or is too old.", param="id")
        return record

    async def all_of(self, tenant: str) -> list[FileRecord]:
        """The tenant's files, the latest first. Raises `StoreError`."""
        keys = await self.state.listed(files_group(tenant))
        found = [await self._read(key) for key in reversed(keys)]
        return [record for record in found if record is not None]

    async def delete(self, record: FileRecord) -> None:
        """Deletes a file. Raises `StoreError`."""
        await self.state.delete(file_key(record.tenant, record.id))
        await self.delete_chunks(record.tenant, record.chunks)

    async def content(self, record: FileRecord) -> AsyncIterator[bytes]:
        """The chunks in order. Raises `NotFound` if one has expired or was deleted meanwhile, and `StoreError`."""
        for chunk_id in record.chunks:
            yield await self.read_chunk(record.tenant, chunk_id)

    async def lines(self, record: FileRecord, *, max_bytes: int) -> AsyncIterator[bytes]:
        """The lines in order, without their ends. Raises as `content` does, and `RequestError` for one too long."""
        rest = b""
        async for chunk in self.content(record):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                yield line
            if len(rest) > max_bytes:
                raise RequestError(f"A line has more than {max_bytes} bytes (--max-body). Shorten it.")
        if rest:
            yield rest

    async def read_chunk(self, tenant: str, chunk_id: str) -> bytes:
        """One chunk. Raises `NotFound` and `StoreError`."""
        key = chunk_key(tenant, chunk_id)
        stored = await self.state.read(key)
        if stored is None:
            raise NotFound("The file has no content any more: it was deleted, or is too old.", param="id")
        return await asyncio.to_thread(opened, stored, key, self.seal)

    async def write_chunk(self, tenant: str, data: bytes) -> str:
        """Stores a chunk; returns its id. Raises `StoreError`."""
        chunk_id = secrets.token_hex(16)
        key = chunk_key(tenant, chunk_id)
        await self.state.create(key, await asyncio.to_thread(sealed, data, key, self.seal))
        return chunk_id

    async def delete_chunks(self, tenant: str, chunk_ids: Sequence[str]) -> None:
        """Deletes chunks. Raises `StoreError`."""
        for chunk_id in chunk_ids:
            await self.state.delete(chunk_key(tenant, chunk_id))

    async def _read(self, key: str) -> FileRecord | None:
        stored = await self.state.read(key)
        return None if stored is None else FileRecord.from_bytes(opened(stored, key, self.seal))


def stored_files(state: StateStore | None, secret: ClusterSecret | None, *, ttl_s: float) -> StoredFiles | None:
    """The files of a store; None: there is no store."""
    return None if state is None else StoredFiles(state, StreamSeal(secret), ttl_s=ttl_s)


class ChunkWriter:
    """Writes the content of a file as it comes, a chunk at a time."""

    def __init__(self, files: StoredFiles, tenant: str) -> None:
        self._files = files
        self._tenant = tenant
        self._buffer = bytearray()
        self.content = Content()

    async def add(self, data: bytes) -> None:
        """Takes in bytes. Raises `StoreError`."""
        self._buffer += data
        self.content.num_bytes += len(data)
        while len(self._buffer) >= CHUNK_BYTES:
            await self._write(CHUNK_BYTES)

    async def create(self, file_id: str, filename: str, purpose: str) -> FileRecord:
        """Writes what is left, and the file's record. Raises `StoreError`."""
        if self._buffer:
            await self._write(len(self._buffer))
        return await self._files.create_of(self.content, self._tenant, file_id, filename=filename, purpose=purpose)

    async def discard(self) -> None:
        """Deletes what was written. Raises `StoreError`."""
        await self._files.delete_chunks(self._tenant, self.content.chunks)

    async def _write(self, num_bytes: int) -> None:
        data = bytes(self._buffer[:num_bytes])
        del self._buffer[:num_bytes]
        self.content.chunks.append(await self._files.write_chunk(self._tenant, data))
