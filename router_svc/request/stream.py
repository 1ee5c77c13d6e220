"""The output of one client request on its way to the client: deltas in order, at most one error, then the end.

Nothing is queued in between: a saga waits while its deltas are written. A client that reads slowly therefore slows down
only its own request, and a token costs no task switch.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from pdserve.base.errors import PdserveError
from router_svc.records.journal import Journal
from router_svc.records.record import Record, TracePhase
from router_svc.request.output import ChoiceDelta

#: A client that reads nothing for this long is disconnected. Otherwise it would hold its queue slot forever.
WRITE_TIMEOUT_S = 60.0

#: A response that has started is not silent for longer, so that no proxy ends it while a worker is replaced.
KEEP_ALIVE_S = 10.0

Write = Callable[[list[ChoiceDelta]], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenUsage:
    """Tokens of a request over all prompts and choices. `cached_tokens` is as the prefilling workers counted."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class DeltaSource(Protocol):
    """Output for a client: of a request that runs, or of one that has ended."""

    async def write_to(self, write: Write, keep_alive: Callable[[], Awaitable[None]] | None = None) -> None:
        """Passes all deltas to `write`, and returns at their end."""

    def first_write(self) -> None:
        """A token was written."""

    @property
    def is_admitted(self) -> bool:
        """Whether it can be refused no more."""

    @property
    def usage(self) -> TokenUsage:
        """Tokens so far."""


class DeltaStream:
    """The output of one client request. Sagas put deltas in; the API layer passes a writer and waits for the end."""

    def __init__(
        self,
        journals: Sequence[Journal],
        on_first_write: Callable[[Record], None],
        *,
        write_timeout_s: float = WRITE_TIMEOUT_S,
    ) -> None:
        """One journal per prompt. `on_first_write` gets the record of the first, which has the time of that write."""
        self._journals = journals
        self._on_first_write = on_first_write
        self._write_timeout_s = write_timeout_s
        self._num_running = len(journals)
        self._write: Write | None = None
        #: Held during a write. asyncio's locks are fair, so deltas are written in the order of `put`.
        self._writing = asyncio.Lock()
        #: Start of the current write, and end of the last one, on the event loop's clock.
        self._writing_since: float | None = None
        self._wrote_at = 0.0
        self._has_written = False
        self._ended = asyncio.Event()
        self._error: Exception | None = None

    async def write_to(self, write: Write, keep_alive: Callable[[], Awaitable[None]] | None = None) -> None:
        """Passes all deltas to `write`, one call at a time, and returns when every prompt is complete.

        `keep_alive` is called whenever there was nothing to write for `KEEP_ALIVE_S`. Call this before any saga runs.
        Raises the error that ended the request, the error of `write`, or `ConnectionResetError` for a client that reads
        nothing within the write timeout.
        """
        self._write = write
        now = asyncio.get_running_loop().time
        self._wrote_at = now()
        while not self._ended.is_set():
            if self._writing_since is not None:
                until = self._writing_since + self._write_timeout_s
                if now() >= until:
                    raise ConnectionResetError(f"the client has read nothing for {self._write_timeout_s:g} s")
            elif keep_alive is None:
                until = now() + self._write_timeout_s
            elif now() < self._wrote_at + KEEP_ALIVE_S:
                until = self._wrote_at + KEEP_ALIVE_S
            else:
                await self._keep_alive(keep_alive)
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(until):
                    await self._ended.wait()
        if self._error is not None:
            raise self._error

    async def _keep_alive(self, keep_alive: Callable[[], Awaitable[None]]) -> None:
        try:
            async with asyncio.timeout(self._write_timeout_s), self._writing:
                await keep_alive()
        except TimeoutError:
            raise ConnectionResetError(f"the client has read nothing for {self._write_timeout_s:g} s") from None
        finally:
            self._wrote_at = asyncio.get_running_loop().time()

    async def put(self, deltas: list[ChoiceDelta], *, first_choice: int = 0) -> None:
        """Writes deltas, and waits while the client is behind. In the response, choice i is `first_choice + i`."""
        assert self._write is not None, "write_to comes first"
        if first_choice:
            deltas = [replace(delta, choice_index=first_choice + delta.choice_index) for delta in deltas]
        async with self._writing:
            if self._ended.is_set():
                return
            self._writing_since = asyncio.get_running_loop().time()
            try:
                await self._write(deltas)
            except Exception as error:  # noqa: BLE001 - not the saga's error: `write_to` raises it
                self._set_ended(error)
            finally:
                self._writing_since = None
                self._wrote_at = asyncio.get_running_loop().time()

    async def end(self, error: PdserveError | None = None) -> None:
        """One prompt is complete, or the whole request fails. Writes in progress come first."""
        self._num_running -= 1
        if error is not None or not self._num_running:
            async with self._writing:
                self._set_ended(error)

    def abort(self, error: PdserveError) -> None:
        """The whole request ends with this error, whatever its prompts do."""
        self._set_ended(error)

    def _set_ended(self, error: Exception | None) -> None:
        if not self._ended.is_set():
            self._error = error
            self._ended.set()

    def first_write(self) -> None:
        """A token was written to the client. Only the first call counts."""
        if self._has_written:
            return
        self._has_written = True
        for journal in self._journals:
            journal.first_written()
        self._on_first_write(self._journals[0].record)

    @property
    def is_admitted(self) -> bool:
        """Whether every prompt has left the admission queue."""
        return all(TracePhase.ADMITTED in journal.record.phases for journal in self._journals)

    def describe(self) -> str:
        """What the request is doing, for an error."""
        records = [journal.record for journal in self._journals]
        states = dict.fromkeys(record.state.value for record in records if not record.state.is_final)
        retries = sum(len(record.retries) for record in records)
        tried = f" after {retries} retries" if retries else ""
        return f"it was {' and '.join(states) or 'complete'}{tried}, with {self.usage.completion_tokens} tokens so far"

    @property
    def usage(self) -> TokenUsage:
        """Tokens so far; final once `write_to` has returned."""
        records = [journal.record for journal in self._journals]
        return TokenUsage(
            prompt_tokens=sum(record.prompt_tokens for record in records),
            completion_tokens=sum(record.completion_tokens for record in records),
            cached_tokens=sum(record.cached_tokens for record in records),
        )
