"""The requests of a batch, read from its file."""

from __future__ import annotations

from collections.abc import AsyncIterator

from pdserve.base.batch_lines import BatchLine, parse_line
from pdserve.base.errors import RequestError
from router_svc.api.files.stored_files import StoredFiles
from router_svc.api.text_threads import TextThreads
from router_svc.state.batch_record import BatchRecord, LineError

#: Requests of one batch.
MAX_LINES = 50_000
#: Mistakes that are reported.
_MAX_ERRORS = 10


class InputInvalid(RequestError):
    """The file is no input of this batch."""

    def __init__(self, errors: list[LineError]) -> None:
        super().__init__(errors[0].message)
        self.errors = errors


class InputLines:
    """Reads the requests of one batch, as often as needed."""

    def __init__(self, files: StoredFiles, threads: TextThreads, record: BatchRecord, *, max_bytes: int) -> None:
        """`max_bytes` of one line."""
        self._files = files
        self._threads = threads
        self._record = record
        self._max_bytes = max_bytes

    async def check(self) -> int:
        """The number of requests. Raises `InputInvalid`, `NotFound` and `StoreError`."""
        custom_ids: set[str] = set()
        errors: list[LineError] = []
        async for number, line in self._numbered():
            message = await self._mistake(line, custom_ids)
            if message:
                errors.append(LineError(code="invalid_line", message=message, line=number))
            if len(custom_ids) > MAX_LINES:
                errors = [LineError(code="too_many_requests", message=f"There are more than {MAX_LINES} requests.")]
            if len(custom_ids) > MAX_LINES or len(errors) == _MAX_ERRORS:
                break
        if not errors and not custom_ids:
            errors = [LineError(code="empty_file", message="The file has no requests.")]
        if errors:
            raise InputInvalid(errors)
        return len(custom_ids)

    async def read(self) -> AsyncIterator[BatchLine]:
        """The requests in order. Raises `RequestError`, `NotFound` and `StoreError`."""
        async for _, line in self._numbered():
            yield await self._parsed(line)

    async def _mistake(self, line: bytes, custom_ids: set[str]) -> str:
        """What is wrong with a line; empty: nothing, and its id is known from now on."""
        try:
            found = await self._parsed(line)
        except RequestError as error:
            return str(error)
        if found.url != self._record.endpoint:
            return f"url: {found.url!r} is not the endpoint of the batch, {self._record.endpoint!r}."
        if found.custom_id in custom_ids:
            return f"custom_id: {found.custom_id[:100]!r} is that of an earlier line. Change it."
        custom_ids.add(found.custom_id)
        return ""

    async def _parsed(self, line: bytes) -> BatchLine:
        return await self._threads.run(len(line), lambda: parse_line(line))

    async def _numbered(self) -> AsyncIterator[tuple[int, bytes]]:
        record = await self._files.find(self._record.tenant, self._record.input_file_id)
        number = 0
        async for line in self._files.lines(record, max_bytes=self._max_bytes):
            number += 1
            if line.strip():
                yield number, line
