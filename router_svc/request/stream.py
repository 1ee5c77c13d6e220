"""The output of one client request on its way to the client: deltas in order, at most one error, then the end.

A saga pushes deltas in the step in which it takes note of their tokens. So a failed attempt, which is cancelled at any
time, loses no token that the next attempt goes on behind. A saga waits while the client is far behind.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from pdserve.base.errors import PdserveError
from pdserve.base.tasks import service_group
from router_svc.records.events import Admitted, FirstWrite, Retried
from router_svc.records.journal import Journal
from router_svc.records.record import Record
from router_svc.request.output import ChoiceDelta

#: A client that reads nothing for this long is disconnected. Otherwise it would hold its queue slot forever.
WRITE_TIMEOUT_S = 60.0

#: While this many pushes wait to be written, sagas wait, too.
_MAX_PENDING = 16

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
    """The output of one client request. Sagas push deltas; `write_to`, which no saga can cancel, writes them."""

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
        #: What is not written yet, in the order of `push`. The first one may be on its way to the client.
        self._pending: deque[list[ChoiceDelta]] = deque()
        self._num_pushed = self._num_written = 0
        self._has_room = asyncio.Event()
        self._has_room.set()
        #: The numbers of pushes that have to be written first, and who waits for them, in order.
        self._marks: deque[tuple[int, asyncio.Future[None]]] = deque()
        #: Set when there is something to write, or nothing any more.
        self._has_news = asyncio.Event()
        #: Start of the current write, and end of the last one, on the event loop's clock.
        self._writing_since: float | None = None
        self._wrote_at = 0.0
        self._has_written = False
        #: Tokens in what was passed on, with the write in progress.
        self._completion_tokens = 0
        #: Whether the stream has ended, so that further pushes are dropped.
        self._has_ended = False
        self._error: PdserveError | None = None
        self._is_aborted = asyncio.Event()

    async def write_to(self, write: Write, keep_alive: Callable[[], Awaitable[None]] | None = None) -> None:
        """Passes all deltas to `write`, one call at a time, and returns when every prompt is complete.

        `keep_alive` is called whenever there was nothing to write for `KEEP_ALIVE_S`. Raises the error that ended the
        request, the error of `write`, or `ConnectionResetError` for a client that reads nothing within the timeout.
        """
        try:
            async with service_group() as group:
                group.start(self._watch(is_kept_alive=keep_alive is not None), name="client")
                await self._write_all(write, keep_alive)
        finally:
            self._end(None)
            self._drop()
        if self._error is not None:
            raise self._error

    async def _write_all(self, write: Write, keep_alive: Callable[[], Awaitable[None]] | None) -> None:
        now = asyncio.get_running_loop().time
        self._wrote_at = now()
        while await self._wait_for_news():
            self._writing_since = now()
            if self._pending:
                self._completion_tokens += sum(len(delta.token_ids) for delta in self._pending[0])
                await write(self._pending[0])
                self._wrote()
            elif keep_alive is not None:
                await keep_alive()
            self._writing_since, self._wrote_at = None, now()
            if self._pending:
                await asyncio.sleep(0)  # Neither a write nor the next one has to wait for anything.

    async def _wait_for_news(self) -> bool:
        """Returns when there is something to write, or the stream was silent for long. False: it is complete."""
        if not self._pending and not self._has_ended:
            self._has_news.clear()
            await self._has_news.wait()
        return bool(self._pending) or not self._has_ended

    async def _watch(self, *, is_kept_alive: bool) -> None:
        """Ends a write that takes too long, or that an abort makes useless. So a write itself needs no timer."""
        now = asyncio.get_running_loop().time
        while not self._is_aborted.is_set():
            if self._writing_since is not None:
                until = self._writing_since + self._write_timeout_s
                if now() >= until:
                    raise ConnectionResetError(f"the client has read nothing for {self._write_timeout_s:g} s")
            elif not is_kept_alive:
                until = now() + self._write_timeout_s
            else:
                until = self._wrote_at + KEEP_ALIVE_S
                if now() >= until:
                    until = now() + KEEP_ALIVE_S
                    self._has_news.set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(until):
                    await self._is_aborted.wait()
        assert self._error is not None
        raise self._error

    def _wrote(self) -> None:
        if self._pending:  # Else the request was aborted meanwhile.
            self._pending.popleft()
            self._num_written += 1
        if len(self._pending) < _MAX_PENDING:
            self._has_room.set()
        self._pass_marks(self._num_written)

    def _pass_marks(self, count: int) -> None:
        while self._marks and self._marks[0][0] <= count:
            _, mark = self._marks.popleft()
            if not mark.done():
                mark.set_result(None)

    def push(self, deltas: list[ChoiceDelta], *, first_choice: int = 0) -> None:
        """Passes deltas on. They will be written, whatever happens to the caller. After the end they are dropped.

        In the response, choice i is `first_choice + i`.
        """
        if self._has_ended or not deltas:
            return
        if first_choice:
            deltas = [replace(delta, choice_index=first_choice + delta.choice_index) for delta in deltas]
        self._pending.append(deltas)
        self._num_pushed += 1
        if len(self._pending) >= _MAX_PENDING:
            self._has_room.clear()
        self._has_news.set()

    async def wait_for_room(self) -> None:
        """Returns when the client has read enough for more. So a slow client slows only its own request."""
        await self._has_room.wait()

    async def wait_until_written(self) -> None:
        """Returns when everything so far was written, or never will be. What comes later is not waited for."""
        if self._pending:
            mark = asyncio.get_running_loop().create_future()
            self._marks.append((self._num_pushed, mark))
            await mark

    def end(self, error: PdserveError | None = None) -> None:
        """One prompt is complete, or the whole request fails. What was pushed before is written first."""
        self._num_running -= 1
        if error is not None or not self._num_running:
            self._end(error)

    def abort(self, error: PdserveError) -> None:
        """The whole request ends with this error, whatever its prompts do and its client reads."""
        if self._has_ended and not self._pending:
            return
        self._end(error)
        self._error = error
        self._drop()
        self._is_aborted.set()

    def _end(self, error: PdserveError | None) -> None:
        """Ends the stream: further pushes are dropped. Only the first end counts."""
        if not self._has_ended:
            self._has_ended = True
            self._error = error
            self._has_news.set()

    def _drop(self) -> None:
        """Drops what is not written yet."""
        self._pending.clear()
        self._has_room.set()
        self._pass_marks(self._num_pushed)

    def first_write(self) -> None:
        """A token was written to the client. Only the first call counts."""
        if self._has_written:
            return
        self._has_written = True
        for journal in self._journals:
            if not journal.record.state.is_final:
                journal.append(FirstWrite())
        self._on_first_write(self._journals[0].record)

    @property
    def is_admitted(self) -> bool:
        """Whether every prompt has left the admission queue."""
        return all(journal.record.log.num(Admitted) for journal in self._journals)

    def describe(self) -> str:
        """What the request is doing, for an error."""
        records = [journal.record for journal in self._journals]
        states = dict.fromkeys(record.state.value for record in records if not record.state.is_final)
        retries = sum(record.log.num(Retried) for record in records)
        tried = f" after {retries} retries" if retries else ""
        return f"it was {' and '.join(states) or 'complete'}{tried}, with {self.usage.completion_tokens} tokens so far"

    @property
    def usage(self) -> TokenUsage:
        """Tokens in what was passed on so far; final once `write_to` has returned."""
        records = [journal.record for journal in self._journals]
        return TokenUsage(
            prompt_tokens=sum(record.prompt_tokens for record in records),
            completion_tokens=self._completion_tokens,
            cached_tokens=sum(record.cached_tokens for record in records),
        )
