"""Structured concurrency: one task group per service and per request, and a clean way to end it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


#: Items that `in_turns` handles before other callbacks get their turn.
_ITEMS_PER_TURN = 32


async def in_turns(items: Iterable[T]) -> AsyncIterator[T]:
    """The items, for loops over many: other callbacks of the event loop run in between."""
    for index, item in enumerate(items):
        if index and index % _ITEMS_PER_TURN == 0:
            await asyncio.sleep(0)
        yield item


@asynccontextmanager
async def freed_in_turns(*lists: list[Any]) -> AsyncIterator[None]:
    """Takes the items out of long lists when the block is left, a few at a time. The first few stay.

    Freeing all that belongs to thousands of prompts in one callback takes 16 ms on a slow core.
    """
    try:
        yield
    finally:
        while any(len(items) > _ITEMS_PER_TURN for items in lists):
            for items in lists:
                del items[-_ITEMS_PER_TURN:]
            await asyncio.sleep(0)


class _Stop(Exception):
    """Raised inside a group to end it. Not an error."""


class ServiceGroup:
    """A `TaskGroup` that can be stopped: its tasks are cancelled and awaited, and nothing is raised."""

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        self._tasks = tasks
        self._stopping = False

    @property
    def stopping(self) -> bool:
        """Whether the group is ending, for any reason. Callbacks check this before `start`."""
        return self._stopping

    def start(self, work: Awaitable[object], *, name: str) -> asyncio.Task[None]:
        """Runs `work` until it ends or the group does. Its failure ends the whole group with that error.

        Raises `RuntimeError`, without running `work`, once the group has started to cancel its tasks.
        """
        running = self._run(work)
        try:
            task = self._tasks.create_task(running, name=name)
        except RuntimeError:
            running.close()
            _close(work)
            raise
        # A task that is cancelled before its first turn has not started `work`.
        task.add_done_callback(lambda _: _close(work))
        return task

    def stop(self) -> None:
        """Cancels every task of the group; the `async with` then ends. Idempotent."""
        if not self._stopping:
            self._stopping = True
            self._tasks.create_task(_raise_stop(), name="stop")

    async def _run(self, work: Awaitable[object]) -> None:
        try:
            await work
        except Exception:
            self._stopping = True
            raise


def _close(work: Awaitable[object]) -> None:
    if asyncio.iscoroutine(work):
        work.close()


async def _raise_stop() -> None:
    raise _Stop


@asynccontextmanager
async def service_group() -> AsyncIterator[ServiceGroup]:
    """The task group of one service: leaving the block stops and awaits all of its tasks.

    A single failing task surfaces as its own exception instead of a group of one.
    """
    task = asyncio.current_task()
    assert task is not None
    cancelling = task.cancelling()
    failure: Exception | None = None
    try:
        async with asyncio.TaskGroup() as tasks:
            group = ServiceGroup(tasks)
            try:
                yield group
                group.stop()
            finally:
                group._stopping = True
    except* _Stop:
        pass
    except* Exception as errors:  # noqa: BLE001 - raised below
        failure = errors.exceptions[0] if len(errors.exceptions) == 1 else errors
    # A `TaskGroup` that ends while it waits for its tasks cancels this one, and, before Python 3.13, does not take that
    # back: the next timeout around this block would end it with CancelledError instead of TimeoutError.
    if task.cancelling() > cancelling:
        task.uncancel()
    if failure is not None:  # Raised out here: before Python 3.11.4, `except*` makes a group of what is raised in it.
        raise failure


async def taken_unless(
    stopped: asyncio.Future[Any], taking: Coroutine[object, object, T], let_go: Callable[[T], None]
) -> T:
    """What `taking` returns. Raises the error that is the result of `stopped` when that is done first.

    However it ends, nothing stays taken in vain: `let_go` gets it.
    """
    task = asyncio.ensure_future(taking)
    try:
        await asyncio.wait((task, stopped), return_when=asyncio.FIRST_COMPLETED)
        if stopped.done():
            raise stopped.result()
        return task.result()
    except BaseException:
        task.add_done_callback(partial(_let_go, let_go))  # Also if the caller is cancelled again.
        task.cancel()
        await asyncio.wait((task,))
        raise


def _let_go(let_go: Callable[[T], None], task: asyncio.Task[T]) -> None:
    if not task.cancelled() and task.exception() is None:
        let_go(task.result())


async def run_to_completion(work: Awaitable[T]) -> T:
    """The result of `work`. If the caller is cancelled meanwhile, the cancellation is raised once `work` has ended."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # Retrieved, since the caller only sees the cancellation.
        try:
            raise cancelled
        finally:
            cancelled = None  # Else it would keep what the callers' frames refer to until garbage is collected.
    return task.result()


def stop_event_on_signals(on_signal: Callable[[str], object]) -> asyncio.Event:
    """An event that SIGTERM and SIGINT set, for a service's main task to wait on. `on_signal` gets each one's name."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def handle(number: signal.Signals) -> None:
        on_signal(number.name)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, handle, number)
    return stop
