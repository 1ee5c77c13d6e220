"""Runs processes until told to stop: awaits readiness, restarts what dies, drains in stages, leaves nothing behind."""

from __future__ import annotations

import asyncio
import math
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from pdserve.base.errors import PdserveError
from pdserve.base.tasks import ServiceGroup, service_group
from pdserve.cli.supervisor.backoff import BackoffPolicy
from pdserve.cli.supervisor.child import Child
from pdserve.cli.supervisor.spec import (
    BecameReady,
    Died,
    Event,
    Exit,
    ProcessSpec,
    Started,
    StartFailed,
    StatusChanged,
    Stopped,
    Stopping,
)


@dataclass(slots=True, eq=False)
class _Managed:
    """A process over its incarnations."""

    spec: ProcessSpec
    #: Done when it was ready for the first time; fails with `StartFailed`.
    first_ready: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    child: Child | None = None


class Supervisor:
    """Owns the child processes; made by `supervising`, which ends them all when its block is left.

    Children are started from the thread that runs the event loop, which has to be the main thread (see `launch`).
    """

    def __init__(self, tasks: ServiceGroup, on_event: Callable[[Event], None], backoff: BackoffPolicy) -> None:
        self._tasks = tasks
        self._on_event = on_event
        self._backoff = backoff
        self._managed: list[_Managed] = []
        self._stopping = asyncio.Event()
        self._hurried = False

    async def start(self, *specs: ProcessSpec) -> None:
        """Starts processes side by side; returns when all are ready. Raises `StartFailed` as soon as one cannot be."""
        starting = [_Managed(spec) for spec in specs]
        self._managed += starting
        for managed in starting:
            self._tasks.start(self._keep_running(managed), name=f"supervise {managed.spec.name}")
        waits = [managed.first_ready for managed in starting]
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for future in waits:
                future.cancel()
        failures = [error for future in done if (error := future.exception()) is not None]
        if failures:
            raise failures[0]

    async def stop(self, *, at_most_s: float = math.inf) -> None:
        """Ends all processes stage by stage: SIGTERM, and SIGKILL after the grace, which `at_most_s` may shorten.

        Nothing is restarted from now on.
        """
        self._stopping.set()
        for stage in sorted({managed.spec.stop_stage for managed in self._managed}):
            async with asyncio.TaskGroup() as group:
                for managed in self._managed:
                    if managed.spec.stop_stage == stage and managed.child is not None:
                        group.create_task(self._stop_child(managed.spec, managed.child, at_most_s))

    def hurry(self) -> None:
        """Ends everything now, without grace; a running `stop` then returns soon."""
        self._stopping.set()
        self._hurried = True
        for managed in self._managed:
            if managed.child is not None:
                managed.child.kill()

    async def _stop_child(self, spec: ProcessSpec, child: Child, at_most_s: float) -> None:
        forced = self._hurried
        if not child.ended.is_set():
            self._on_event(Stopping(spec=spec))
            if self._hurried:
                child.kill()
            child.terminate()
            try:
                async with asyncio.timeout(min(spec.stop_grace_s, at_most_s)):
                    await child.ended.wait()
            except TimeoutError:
                forced = True
                child.kill()
                await child.ended.wait()
        self._on_event(Stopped(spec=spec, exit=child.exit(), forced=forced or self._hurried))

    async def _keep_running(self, managed: _Managed) -> None:
        """One incarnation after another, until stopping."""
        delay_s: float | None = None
        is_restart = False
        while not self._stopping.is_set():
            end = await self._run_once(managed, is_restart=is_restart)
            if self._stopping.is_set():
                return
            if not managed.first_ready.done():
                managed.first_ready.set_exception(StartFailed(_start_failure(managed.spec, end)))
                return
            delay_s = self._backoff.delay_s(delay_s, end.ran_s)
            self._on_event(Died(spec=managed.spec, exit=end, restart_in_s=delay_s))
            is_restart = True
            try:
                async with asyncio.timeout(delay_s):
                    await self._stopping.wait()
            except TimeoutError:
                continue

    async def _run_once(self, managed: _Managed, *, is_restart: bool) -> Exit:
        """One incarnation from start to end."""
        spec = managed.spec
        try:
            child = Child(spec, lambda text: self._on_event(StatusChanged(spec=spec, text=text)))
        except OSError as error:
            return Exit(code=1, ran_s=0.0, was_ready=False, reason=f"error: Cannot start {spec.name}: {error}.")
        managed.child = child
        try:
            self._on_event(Started(spec=spec, pid=child.pid))
            given_up = await _wait_ready(spec, child)
            if child.was_ready:
                self._on_event(BecameReady(spec=spec, took_s=child.ran_s, is_restart=is_restart))
                if not managed.first_ready.done():
                    managed.first_ready.set_result(None)
            await child.ended.wait()
        finally:
            child.kill()
            await child.ended.wait()
        end = child.exit()
        return end if given_up is None else Exit(code=end.code, ran_s=end.ran_s, was_ready=False, reason=given_up)


async def _wait_ready(spec: ProcessSpec, child: Child) -> str | None:
    """Returns when the process is ready or has ended, or why it was killed because neither came in time."""
    given_up = None
    async with asyncio.TaskGroup() as group:
        ended = group.create_task(child.ended.wait())
        ready = group.create_task(_ready(spec, child))
        await asyncio.wait({ended, ready}, return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            given_up = ready.result()
            if given_up is None:
                child.was_ready = True
            else:
                child.kill()
        ended.cancel()
        ready.cancel()
    return given_up


async def _ready(spec: ProcessSpec, child: Child) -> str | None:
    """Waits for readiness within the deadline; the reason when it does not come."""
    try:
        async with asyncio.timeout(spec.ready_timeout_s):
            await (spec.probe() if spec.probe is not None else child.said_ready.wait())
    except TimeoutError:
        doing = f"; it was last {child.status}" if child.status else ""
        return f"error: {spec.name} was not ready within {spec.ready_timeout_s:g} s{doing}."
    except PdserveError as error:
        return f"error: {error}"
    return None


def _start_failure(spec: ProcessSpec, end: Exit) -> str:
    """One line: the process's own words when it reported an error, else how it ended."""
    if end.reason.startswith("error:"):
        return end.reason.removeprefix("error:").strip()
    said = f": {end.reason}" if end.reason else ""
    guess = "; did the machine run out of memory?" if end.code == -signal.SIGKILL else ""
    return f"{spec.name} {end.describe()} before it was ready{said}{guess} (log: {spec.log_path})"


@asynccontextmanager
async def supervising(
    on_event: Callable[[Event], None], *, backoff: BackoffPolicy | None = None
) -> AsyncIterator[Supervisor]:
    """A supervisor whose processes are all gone when the block ends, however it ends."""
    async with service_group() as tasks:
        yield Supervisor(tasks, on_event, backoff or BackoffPolicy())
