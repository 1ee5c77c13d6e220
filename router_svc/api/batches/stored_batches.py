"""The batches of this cluster that are stored, by their owner and id."""

from __future__ import annotations

import asyncio

from pdserve.base.errors import NotFound, RequestError
from router_svc.api.files.stored_files import StoredFiles
from router_svc.state.batch_record import BatchRecord, batch_key, batches_group
from router_svc.state.sealed import opened, sealed

#: Batches of one tenant at a time, ended ones included.
MAX_BATCHES = 1000


class StoredBatches:
    """Reads and writes records. Belongs to the event loop."""

    def __init__(self, files: StoredFiles) -> None:
        self.files = files
        self.state = files.state

    async def create(self, record: BatchRecord, *, holder: str) -> None:
        """Stores a new batch, claimed by the holder. Raises `RequestError` if there are too many, and `StoreError`."""
        if len(await self.state.listed(batches_group(record.tenant))) >= MAX_BATCHES:
            raise RequestError(f"There are {MAX_BATCHES} batches already, which is the limit. Wait until some expire.")
        await self.state.create(record.key, await self._packed(record), holder=holder, is_listed=True)

    async def find(self, tenant: str, batch_id: str) -> BatchRecord:
        """The record. Raises `NotFound`, also for that of another tenant, and `StoreError`."""
        record = await self.read(batch_key(tenant, batch_id))
        if record is None:
            raise NotFound(f"There is no batch `{batch_id[:100]}`, or it is too old.", param="id")
        return record

    async def read(self, key: str) -> BatchRecord | None:
        """The record of a key. Raises `StoreError`."""
        stored = await self.state.read(key)
        if stored is None:
            return None
        return await asyncio.to_thread(lambda: BatchRecord.from_bytes(opened(stored, key, self.files.seal)))

    async def keys_of(self, tenant: str) -> list[str]:
        """The keys of the tenant's batches, the latest first. Raises `StoreError`."""
        return (await self.state.listed(batches_group(tenant)))[::-1]

    async def update(self, record: BatchRecord, holder: str) -> bool:
        """Changes an open batch. False: it is no longer the holder's. Raises `StoreError`."""
        return await self.state.update(record.key, await self._packed(record), holder, is_open=not record.is_terminal)

    async def _packed(self, record: BatchRecord) -> bytes:
        return await asyncio.to_thread(lambda: sealed(record.to_bytes(), record.key, self.files.seal))
