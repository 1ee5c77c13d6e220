"""What a request's sagas produce, as its API layer reads it: deltas in order, one error at most, then the end.

The queue is short on purpose: a client that reads slowly slows its own request down, and nobody else's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from pdserve.base.errors import PdserveError
from router_svc.output import ChoiceDelta
from router_svc.record import Phase, Record

_MAX_QUEUED = 64

#: A client that takes nothing for this long is given up: it would keep its place for ever.
WRITE_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of a request, over all prompts and choices; `cached_tokens` as the prefilling worker saw it."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class Stream:
    """One client request's output. Sagas put, the API layer iterates."""

    def __init__(self, records: Sequence[Record], on_first_write: Callable[[float], None]) -> None:
        """`on_first_write` hears the seconds from accepting the request to its first token being written."""
        self._records = records
        self._on_first_write = on_first_write
        self._running = len(records)
        self._queue: asyncio.Queue[list[ChoiceDelta] | PdserveError | None] = asyncio.Queue(_MAX_QUEUED)

    async def put(self, deltas: list[ChoiceDelta]) -> None:
        """Waits while the client is behind. Choice indices are those of the whole response."""
        await self._queue.put(deltas)

    async def end(self, error: PdserveError | None = None) -> None:
        """One prompt is complete, or the whole request fails."""
        self._running -= 1
        if error is not None or not self._running:
            await self._queue.put(error)

    def __aiter__(self) -> AsyncIterator[list[ChoiceDelta]]:
        return self._deltas()

    async def _deltas(self) -> AsyncIterator[list[ChoiceDelta]]:
        while (item := await self._queue.get()) is not None:
            if isinstance(item, PdserveError):
                raise item
            yield item

    def first_write(self) -> None:
        """A token was written to the client; only the first time counts."""
        news = [record.mark(Phase.FIRST_WRITE) for record in self._records]
        if any(news):
            self._on_first_write(self._records[0].phases[Phase.FIRST_WRITE])

    @property
    def usage(self) -> Usage:
        """As of now; final once the iteration has ended."""
        return Usage(
            prompt_tokens=sum(record.prompt_tokens for record in self._records),
            completion_tokens=sum(record.completion_tokens for record in self._records),
            cached_tokens=sum(record.cached_tokens for record in self._records),
        )
