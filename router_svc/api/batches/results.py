"""The results of one batch while a router runs it: each is stored before its request counts as done.

Results are chunks of whole lines, and the batch's record says which chunks count. Only the holder of its claim changes
the record, so that no line counts twice, whatever a router that has lost the claim still writes. The last chunk is
written again with the lines that come, under another id, until it is large.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pdserve.base.batch_lines import custom_id_of
from pdserve.base.errors import StaleError, StoreError
from pdserve.base.logs import get_logger
from router_svc.api.batches.stored_batches import StoredBatches
from router_svc.state.batch_record import BatchRecord
from router_svc.state.file_record import Content

log = get_logger(__name__)

#: A chunk of this size is not written again.
_FULL_BYTES = 1 << 18
_RETRY_S = 0.5


@dataclass(frozen=True, slots=True)
class Result:
    """The line of a request that has ended."""

    line: bytes
    is_success: bool


class Results:
    """Owns the record of a batch that this router has claimed."""

    def __init__(self, batches: StoredBatches, record: BatchRecord, holder: str) -> None:
        self.record = record
        self._batches = batches
        self._holder = holder
        self._pending: list[Result] = []
        self._lock = asyncio.Lock()

    async def done(self) -> set[str]:
        """The custom ids of the requests that have a result. Raises `StoreError` and `NotFound`."""
        found: set[str] = set()
        for chunk_id in [*self.record.output.chunks, *self.record.error.chunks]:
            chunk = await self._batches.files.read_chunk(self.record.tenant, chunk_id)
            ids = await asyncio.to_thread(lambda data: [custom_id_of(line) for line in data.split(b"\n")], chunk)
            found.update(custom_id for custom_id in ids if custom_id is not None)
        return found

    async def add(self, result: Result) -> None:
        """Stores a result, together with those of others that wait. Waits while the store is away.

        Raises `StaleError` when the batch is another router's.
        """
        self._pending.append(result)
        async with self._lock:
            results, self._pending = self._pending, []
            if results:
                await self._write(results)

    async def change(self, **changes: object) -> None:
        """Changes the record. Waits while the store is away. Raises `StaleError` when it is another router's."""
        async with self._lock:
            await self._store(replace(self.record, **changes))  # type: ignore[arg-type]

    async def _write(self, results: Sequence[Result]) -> None:
        successes = [each.line for each in results if each.is_success]
        failures = [each.line for each in results if not each.is_success]
        record = self.record
        while True:
            try:
                output, error = await self._grown(record.output, successes), await self._grown(record.error, failures)
                break
            except StoreError:  # The store logs outages.
                await asyncio.sleep(_RETRY_S)
        old = [*record.output.chunks[-1:], *record.error.chunks[-1:]]
        await self._store(
            replace(
                record,
                output=output,
                error=error,
                completed=record.completed + len(successes),
                failed=record.failed + len(failures),
                attempts=0,
            )
        )
        kept = {*output.chunks, *error.chunks}
        with contextlib.suppress(StoreError):
            await self._batches.files.delete_chunks(record.tenant, [each for each in old if each not in kept])

    async def _grown(self, content: Content, lines: Sequence[bytes]) -> Content:
        """The content with more lines. Raises `StoreError` and `NotFound`."""
        if not lines:
            return content
        files, tenant, added = self._batches.files, self.record.tenant, b"".join(lines)
        chunks, tail = content.chunks, b""
        if chunks:
            last = await files.read_chunk(tenant, chunks[-1])
            if len(last) < _FULL_BYTES:
                chunks, tail = chunks[:-1], last
        return Content(
            chunks=[*chunks, await files.write_chunk(tenant, tail + added)], num_bytes=content.num_bytes + len(added)
        )

    async def _store(self, record: BatchRecord) -> None:
        while True:
            try:
                is_ours = await self._batches.update(record, self._holder)
                break
            except StoreError:
                await asyncio.sleep(_RETRY_S)
        if not is_ours:
            raise StaleError(f"The batch {record.id} is another router's.")
        self.record = record
