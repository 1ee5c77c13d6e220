"""An event loop on a thread of its own, for callers that have none or one that is busy, such as notebooks."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Coroutine
from typing import Any, Generic, TypeVar

from pdserve.llm.errors import ShutDown

T = TypeVar("T")


class _Call(Generic[T]):
    """Work on the loop, whose result another thread waits for. The methods are for the loop's thread."""

    def __init__(self, work: Coroutine[Any, Any, T]) -> None:
        self._work = work
        self.task: asyncio.Task[T] | None = None
        self.result: concurrent.futures.Future[T] = concurrent.futures.Future()

    def start(self) -> None:
        """Starts the work, unless it was cancelled before."""
        if not self.result.done():
            self.task = asyncio.get_running_loop().create_task(self._work)
            self.task.add_done_callback(self._end)

    def cancel(self) -> None:
        """Cancels the work. The result is there once the work has ended."""
        if self.task is not None:
            self.task.cancel()
        elif not self.result.done():
            self._work.close()
            self.result.set_exception(concurrent.futures.CancelledError())

    def _end(self, task: asyncio.Task[T]) -> None:
        error = concurrent.futures.CancelledError() if task.cancelled() else task.exception()
        if error is None:
            self.result.set_result(task.result())
        else:
            self.result.set_exception(error)


class LoopThread:
    """Runs coroutines for blocking callers, until it is closed."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        #: Guards `_calls` and `_closing`, so that no call starts behind the end.
        self._lock = threading.Lock()
        self._calls: set[_Call[Any]] = set()
        self._closing: _Call[None] | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="pdserve-llm", daemon=True)
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`. If the caller is interrupted, by Ctrl-C for example, `work` is cancelled first.

        Raises `ShutDown` once the thread is closed, and `RuntimeError` where waiting would never end: on the thread
        itself, and in a process that was forked, where the thread does not exist.
        """
        if self.is_forked or threading.current_thread() is self._thread:
            work.close()
            if self.is_forked:
                raise RuntimeError("This LLM belongs to the process that was forked. Make another one in this process.")
            raise RuntimeError("A progress bar cannot call the LLM that it belongs to. Call it from another thread.")
        call = _Call(work)
        try:
            self._start(call)
            return call.result.result()
        except BaseException as error:
            if not call.result.done():
                self._cancel(call)
                concurrent.futures.wait([call.result])
            if self._closing is not None and isinstance(error, concurrent.futures.CancelledError):
                raise ShutDown from None
            raise
        finally:
            with self._lock:
                self._calls.discard(call)

    @property
    def is_forked(self) -> bool:
        """Whether this process is a fork of the one that has the thread."""
        return os.getpid() != self._pid

    def close(self, last: Coroutine[Any, Any, None] | None = None) -> None:
        """Ends all calls, which raise `ShutDown`, runs `last`, and ends the thread. Idempotent.

        Returns when the thread has ended, except on the thread itself, where the garbage collector may call it. Raises
        what `last` raises.
        """
        with self._lock:
            if self._closing is None:
                self._closing = _Call(self._end(last))
                self._loop.call_soon_threadsafe(self._closing.start)
            elif last is not None:
                last.close()
        if threading.current_thread() is not self._thread:
            self._thread.join()
            self._closing.result.result()

    def _start(self, call: _Call[Any]) -> None:
        with self._lock:
            if self._closing is None:
                self._calls.add(call)
                self._loop.call_soon_threadsafe(call.start)
            else:
                call.cancel()

    def _cancel(self, call: _Call[Any]) -> None:
        with self._lock:
            if self._closing is None:
                self._loop.call_soon_threadsafe(call.cancel)
            elif call not in self._calls:  # Else the end of the thread ends it.
                call.cancel()

    async def _end(self, last: Coroutine[Any, Any, None] | None) -> None:
        with self._lock:
            calls = list(self._calls)
        for call in calls:
            call.cancel()
        try:
            await asyncio.gather(*(call.task for call in calls if call.task is not None), return_exceptions=True)
            if last is not None:
                await last
        finally:
            self._loop.stop()

    def _run(self) -> None:
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()
