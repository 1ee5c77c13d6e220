"""An event loop with a virtual clock, on which several simulated processes run. A process can die or stand still.

Each callback belongs to the process in whose context it was scheduled. A dead process's callbacks never run: neither
its `finally` blocks nor its timers have an effect, as after SIGKILL. Callbacks of one process run in the order in which
they became ready. Those of different processes, which share nothing but the network, are merged in a random order.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import traceback
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar
from random import Random
from typing import Any

_serials = itertools.count(1)


class StableTask(asyncio.Task):  # type: ignore[type-arg]
    """A task whose hash is its number, so that sets of tasks have the same order in each run."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self._serial = next(_serials)
        super().__init__(*arguments, **named)

    def __hash__(self) -> int:
        return self._serial


class StableFuture(asyncio.Future):  # type: ignore[type-arg]
    """As `StableTask`, for futures."""

    def __init__(self, **named: Any) -> None:
        self._serial = next(_serials)
        super().__init__(**named)

    def __hash__(self) -> int:
        return self._serial


def stable_hash(thing: object) -> int:
    """For classes that hash by address: the number of the first time that the object was hashed."""
    number: int | None = thing.__dict__.get("_stable_hash")
    if number is None:
        number = thing.__dict__["_stable_hash"] = next(_serials)
    return number


class Process:
    """One simulated process, from its start to its end. A restarted one is another object."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_dead = False
        self.is_paused = False
        #: What became ready while the process stood still.
        self.held: list[events.Handle] = []
        #: Difference of its wall clock to the true one, in seconds.
        self.clock_offset_s = 0.0
        self.context = Context()
        self.context.run(_PROCESS.set, self)
        #: Live tasks. After its death they are kept, so that no `finally` block runs when they are collected.
        self.tasks: set[StableTask] = set()
        #: Called when the process dies, with whether its host dies with it: closes its connections.
        self.on_death: list[Callable[[bool], None]] = []

    def __repr__(self) -> str:
        return f"<{self.name}>"


_PROCESS: ContextVar[Process] = ContextVar("process")


def current_process() -> Process | None:
    """The process whose callback runs."""
    return _PROCESS.get(None)


class Stuck(Exception):
    """Nothing is left to do, and the run is not over."""


class SimulatedLoop(asyncio.BaseEventLoop):
    """The clock starts at 0 and jumps to the next timer when nothing is ready."""

    def __init__(self, random: Random) -> None:
        super().__init__()
        self._now = 0.0
        self._random = random
        self._clock_resolution = 1e-9
        #: Timers by time, then by number: comparing handles would take longer.
        self._timers: list[tuple[float, int, events.TimerHandle]] = []
        self._num_timers = 0
        #: What tasks and callbacks of live processes failed with, without anybody noticing.
        self.unnoticed: list[str] = []
        self.num_callbacks = 0
        #: Set by the episode.
        self.network: Any = None
        self.open_connection: Callable[..., Coroutine[Any, Any, Any]] | None = None
        self.open_server: Callable[..., Any] | None = None
        self.set_exception_handler(SimulatedLoop._note_failure)

    def time(self) -> float:
        return self._now

    def call_at(
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> events.TimerHandle:
        timer = events.TimerHandle(when, callback, args, self, context)
        self._num_timers += 1
        heapq.heappush(self._timers, (when, self._num_timers, timer))
        timer._scheduled = True  # type: ignore[attr-defined]
        return timer

    # Tasks and processes.
    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, Any], *, name: str | None = None, context: Context | None = None
    ) -> StableTask:
        task = StableTask(coro, loop=self, name=name, context=context)
        process = current_process() if context is None else context.get(_PROCESS)
        if process is not None:
            process.tasks.add(task)
            # Not a done callback: that would cost a turn of the loop, and run in another order.
            if len(process.tasks) % 64 == 0:
                process.tasks = {each for each in process.tasks if not each.done()}
        return task

    def create_future(self) -> StableFuture:  # type: ignore[override]
        return StableFuture(loop=self)

    def start(self, process: Process, work: Coroutine[Any, Any, Any], name: str) -> StableTask:
        """Runs `work` as a task of `process`."""

        async def run() -> None:
            try:
                await work
            except Exception as error:  # noqa: BLE001 - no process may end by itself
                self.unnoticed.append(f"{process} ended: {''.join(traceback.format_exception(error))}")

        return self.create_task(run(), name=name, context=process.context.copy())

    def kill(self, process: Process, *, with_host: bool = False) -> None:
        """Nothing of the process runs any more. Its peers see its connections end, unless its host dies with it."""
        if process.is_dead:
            return
        process.is_dead = True
        process.held.clear()
        for end in process.on_death:
            end(with_host)

    def pause(self, process: Process, seconds: float) -> None:
        """The process stands still, as after SIGSTOP."""
        if process.is_dead or process.is_paused:
            return
        process.is_paused = True
        self.call_later(seconds, self._go_on, process, context=Context())

    def _go_on(self, process: Process) -> None:
        process.is_paused = False
        held, process.held = process.held, []
        if not process.is_dead:
            self._ready.extend(held)  # type: ignore[attr-defined]

    # The loop.
    def call_soon(self, callback: Callable[..., Any], *args: Any, context: Context | None = None) -> events.Handle:
        handle = events.Handle(callback, args, self, context)
        self._ready.append(handle)  # type: ignore[attr-defined]
        return handle

    def _run_once(self) -> None:
        ready: deque[events.Handle] = self._ready  # type: ignore[attr-defined]
        timers = self._timers
        if not ready and not self._stopping:  # type: ignore[attr-defined]
            self._sweep()
            if not timers:
                raise Stuck("no process waits for anything that will happen")
            self._now = max(self._now, timers[0][0])
        while timers and timers[0][0] <= self._now:
            ready.append(heapq.heappop(timers)[2])
        for handle in (ready.popleft(),) if len(ready) == 1 else self._merged(ready):
            if handle._cancelled:  # type: ignore[attr-defined]
                continue
            process = handle._context.get(_PROCESS)  # type: ignore[attr-defined]
            if process is not None:
                if process.is_dead:
                    continue
                if process.is_paused:
                    process.held.append(handle)
                    continue
            self.num_callbacks += 1
            handle._run()  # type: ignore[attr-defined]

    def _merged(self, ready: deque[events.Handle]) -> list[events.Handle]:
        """All that is ready: of each process in order, of several processes merged at random."""
        handles = list(ready)
        ready.clear()
        if not handles:
            return handles
        first = handles[0]._context.get(_PROCESS)  # type: ignore[attr-defined]
        if all(each._context.get(_PROCESS) is first for each in handles):  # type: ignore[attr-defined]
            return handles
        queues: dict[Process | None, deque[events.Handle]] = {}
        for handle in handles:
            queues.setdefault(handle._context.get(_PROCESS), deque()).append(handle)  # type: ignore[attr-defined]
        merged, waiting = [], list(queues.values())
        while waiting:
            queue = waiting[int(self._random.random() * len(waiting))]
            merged.append(queue.popleft())
            if not queue:
                waiting.remove(queue)
        return merged

    def _sweep(self) -> None:
        """Drops cancelled timers, and those of dead processes, from the head; now and then all of them."""
        timers = self._timers
        if len(timers) > 512 and self._timer_cancelled_count > len(timers) // 2:  # type: ignore[has-type]
            timers[:] = [each for each in timers if not each[2]._cancelled]  # type: ignore[attr-defined]
            heapq.heapify(timers)
            self._timer_cancelled_count = 0
        while timers:
            timer = timers[0][2]
            process = timer._context.get(_PROCESS)  # type: ignore[attr-defined]
            if not timer._cancelled and (process is None or not process.is_dead):  # type: ignore[attr-defined]
                return
            heapq.heappop(timers)

    # What would be threads, sockets and signals.
    def call_soon_threadsafe(self, callback: Callable[..., Any], *args: Any, context: Context | None = None) -> Any:
        return self.call_soon(callback, *args, context=context)

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        """Runs it a little later: other callbacks come in between, as with a thread."""
        future = self.create_future()

        def run() -> None:
            try:
                result = func(*args)
            except Exception as error:  # noqa: BLE001 - the caller's
                if not future.cancelled():
                    future.set_exception(error)
            else:
                if not future.cancelled():
                    future.set_result(result)

        self.call_later(self._random.random() * 1e-3, run)
        return future

    async def create_connection(self, protocol_factory: Any, host: Any = None, port: Any = None, **_: Any) -> Any:
        assert self.open_connection is not None
        return await self.open_connection(protocol_factory, f"{host}:{port}")

    async def create_server(self, protocol_factory: Any, *, sock: Any = None, **_: Any) -> Any:  # type: ignore[override]
        assert self.open_server is not None
        return self.open_server(protocol_factory, sock)

    def remove_reader(self, fd: Any) -> bool:
        return False

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:  # noqa: ASYNC109 - as in asyncio
        pass

    def _process_events(self, event_list: Any) -> None:
        pass

    def _write_to_self(self) -> None:
        pass

    def _note_failure(self, context: dict[str, Any]) -> None:
        process = current_process()
        task = context.get("task") or context.get("future")
        if process is not None and process.is_dead:
            return
        error = context.get("exception")
        self.unnoticed.append(f"{process} at {self._now:.3f}: {context.get('message')}: {error!r} {task!r:.200}")
