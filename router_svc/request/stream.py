"""What a request's sagas produce, on its way to the client: deltas in order, one error at most, then the end.

Nothing is queued between: a saga waits while its deltas are written. So a client that reads slowly slows its own
request down and nobody else's, and a token costs no switch between tasks.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from pdserve.base.errors import PdserveError
from router_svc.records.record import Phase, Record
from router_svc.request.output import ChoiceDelta

#: A client that takes nothing for this long is given up: it would keep its place for ever.
WRITE_TIMEOUT_S = 60.0

Write = Callable[[list[ChoiceDelta]], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of a request, over all prompts and choices; `cached_tokens` as the prefilling worker saw it."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class Stream:
    """One client request's output. Sagas put; the API layer says where it goes, and waits for the end."""

    def __init__(self, records: Sequence[Record], on_first_write: Callable[[float], None]) -> None:
        """`on_first_write` hears the seconds from accepting the request to its first token being written."""
        self._records = records
        self._on_first_write = on_first_write
        self._running = len(records)
        self._write: Write | None = None
        #: Held while something is written; whoever waits for it gets it in the order of asking.
        self._writing = asyncio.Lock()
        #: When the write under way began, on the event loop's clock.
        self._writing_since: float | None = None
        self._has_written = False
        self._over = asyncio.Event()
        self._error: Exception | None = None

    async def into(self, write: Write) -> None:
        """Has everything written by `write`, called for one piece at a time, until every prompt is complete.

        Called before any saga runs. Raises the error that ended the request, what `write` raised, or
        `ConnectionResetError` for a client that takes nothing for `WRITE_TIMEOUT_S`.
        """
        self._write = write
        now = asyncio.get_running_loop().time
        while not self._over.is_set():
            since = now() if self._writing_since is None else self._writing_since
            if now() >= since + WRITE_TIMEOUT_S:
                raise ConnectionResetError(f"the client has read nothing for {WRITE_TIMEOUT_S:g} s")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(since + WRITE_TIMEOUT_S):
                    await self._over.wait()
        if self._error is not None:
            raise self._error

    async def put(self, deltas: list[ChoiceDelta]) -> None:
        """Waits while the client is behind. Choice indices are those of the whole response."""
        assert self._write is not None, "into comes first"
        async with self._writing:
            if self._over.is_set():
                return
            self._writing_since = asyncio.get_running_loop().time()
            try:
                await self._write(deltas)
            except Exception as error:  # noqa: BLE001 - not the saga's: whoever waits for the end hears it
                self._end(error)
            finally:
                self._writing_since = None

    async def end(self, error: PdserveError | None = None) -> None:
        """One prompt is complete, or the whole request fails. What is being written, by any of them, comes first."""
        self._running -= 1
        if error is not None or not self._running:
            async with self._writing:
                self._end(error)

    def _end(self, error: Exception | None) -> None:
        if not self._over.is_set():
            self._error = error
            self._over.set()

    def first_write(self) -> None:
        """A token was written to the client; only the first time counts."""
        if self._has_written:
            return
        self._has_written = True
        for record in self._records:
            record.mark(Phase.FIRST_WRITE)
        self._on_first_write(self._records[0].phases[Phase.FIRST_WRITE])

    @property
    def usage(self) -> Usage:
        """As of now; final once the iteration has ended."""
        return Usage(
            prompt_tokens=sum(record.prompt_tokens for record in self._records),
            completion_tokens=sum(record.completion_tokens for record in self._records),
            cached_tokens=sum(record.cached_tokens for record in self._records),
        )
