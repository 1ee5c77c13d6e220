"""The threads for work on long texts: parsing, templates, tokenizing. Their queue is bounded."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from pdserve.base.errors import Overloaded

Result = TypeVar("Result")

#: Work up to this size is done on the event loop. That takes well below 1 ms, less than a switch to a thread.
INLINE_CHARACTERS = 2048
#: Work that is accepted while other work runs or waits, in characters.
MAX_WAITING_CHARACTERS = 16 * 1024**2
#: More threads would only take cores from the workers of a small machine.
_NUM_THREADS = 2
#: Work beyond this size uses one thread only, so that the other one is free for texts of ordinary length.
LONG_CHARACTERS = 100_000
#: Speed that is assumed before any work was measured.
_CHARACTERS_PER_S = 1_000_000.0


class TextThreads:
    """Runs work on texts, short work at once and long work in threads. Belongs to the event loop."""

    def __init__(
        self, *, max_waiting_characters: int = MAX_WAITING_CHARACTERS, inline_characters: int = INLINE_CHARACTERS
    ) -> None:
        """Work up to `inline_characters` is done on the event loop; with -1 none is."""
        self._inline = inline_characters
        self._max_waiting = max_waiting_characters
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="text")
        self._long = asyncio.Semaphore(_NUM_THREADS - 1)
        self._characters_per_s = _CHARACTERS_PER_S
        #: Work that waits or runs, in characters.
        self.waiting_characters = 0
        #: Work that was refused because too much waited.
        self.refused = 0

    async def run(self, characters: int, work: Callable[[], Result]) -> Result:
        """The result of `work` on a text of this size. Raises what it does, or `Overloaded` without calling it."""
        if characters <= self._inline:
            return work()
        waiting = self.waiting_characters
        if waiting and waiting + characters > self._max_waiting:
            self.refused += 1
            retry_after_s = max(waiting / self._characters_per_s, 1.0)
            raise Overloaded(
                f"Texts of {waiting} characters are waiting to be tokenized, and this one has {characters} "
                f"(limit {self._max_waiting} together). Retry after {retry_after_s:.0f} s.",
                retry_after_s=retry_after_s,
            )
        self.waiting_characters += characters
        is_long = characters > LONG_CHARACTERS
        try:
            if is_long:
                await self._long.acquire()
        except asyncio.CancelledError:
            self.waiting_characters -= characters
            raise
        return await asyncio.wrap_future(self._submit(characters, work, is_long=is_long))

    def _submit(self, characters: int, work: Callable[[], Result], *, is_long: bool) -> Future[Result]:
        loop = asyncio.get_running_loop()

        took_s: list[float] = []

        def measured() -> Result:
            start = time.monotonic()
            try:
                return work()
            finally:
                took_s.append(time.monotonic() - start)

        def ended() -> None:
            for seconds in took_s:
                self._characters_per_s += (characters / max(seconds, 1e-6) - self._characters_per_s) * 0.1
            self.waiting_characters -= characters
            if is_long:
                self._long.release()

        def on_done(_: Future[Result]) -> None:
            # Counted until the thread is free, which is later than the request if its client has left.
            with contextlib.suppress(RuntimeError):  # The event loop is closed.
                loop.call_soon_threadsafe(ended)

        future = self._threads.submit(measured)
        future.add_done_callback(on_done)
        return future

    def close(self) -> None:
        """Ends the threads after their current work."""
        self._threads.shutdown(wait=False)
