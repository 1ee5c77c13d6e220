"""Keeps processes running until stopped: awaits readiness, restarts what dies, drains in stages."""

from __future__ import annotations

import asyncio
import math
import signal
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from pdserve.base.errors import PdserveError
from pdserve.base.tasks import ServiceGroup, service_group
from pdserve.cli.stop_signals import finished_before
from pdserve.cli.supervisor.backoff import BackoffPolicy
from pdserve.cli.supervisor.child import Child
from pdserve.cli.supervisor.fork_server import ForkServer
from pdserve.cli.supervisor.spec import (
    BecameReady,
    Died,
    Exit,
    ProcessEvent,
    ProcessSpec,
    ProcessStarted,
    StartFailed,
    StatusChanged,
    Stopped,
    Stopping,
)
from pdserve.cli.supervisor.start import ChildProcess, execute


@dataclass(slots=True, eq=False)
class _Managed:
    """A process that is kept running, across all its incarnations."""

    spec: ProcessSpec
    #: Done when the process was ready for the first time; fails with `StartFailed`.
    first_ready: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    child: Child | None = None


class Supervisor:
    """Owner of the child processes. `supervising` makes it and ends them all when its block is left.

    Children are started from the thread that runs the event loop, which must be the main thread (see `launch`).
    """

    def __init__(self, tasks: ServiceGroup, on_event: Callable[[ProcessEvent], None], backoff: BackoffPolicy) -> None:
        self._tasks = tasks
        self._forks: ForkServer | None = None
        self._on_event = on_event
        self._backoff = backoff
        self._managed: list[_Managed] = []
        self._stopping = asyncio.Event()
        self._hurried = False

    def fork_from(self, server: ForkServer | None) -> None:
        """Runs the server, if any. It forks the processes that are started from now on and that may be forked."""
        self._forks = server
        if server is not None:
            self._tasks.start(server.run(), name="fork server")

    async def start(self, *specs: ProcessSpec) -> None:
        """Starts processes concurrently; returns when all are ready. Raises `StartFailed` as soon as one cannot be."""
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

    async def stop(self, *, max_grace_s: float = math.inf) -> None:
        """Ends all processes stage by stage: SIGTERM, then SIGKILL after the spec's grace or `max_grace_s`.

        From now on nothing is restarted.
        """
        self._stopping.set()
        for stage in sorted({managed.spec.stop_stage for managed in self._managed}):
            async with asyncio.TaskGroup() as group:
                for managed in self._managed:
                    if managed.spec.stop_stage == stage and managed.child is not None:
                        group.create_task(self._stop_child(managed.spec, managed.child, max_grace_s))

    def hurry(self) -> None:
        """Kills everything now, without grace; a running `stop` then returns soon."""
        self._stopping.set()
        self._hurried = True
        for managed in self._managed:
            if managed.child is not None:
                managed.child.kill()

    async def _stop_child(self, spec: ProcessSpec, child: Child, max_grace_s: float) -> None:
        forced = self._hurried
        if not child.ended.is_set():
            self._on_event(Stopping(spec=spec))
            if self._hurried:
                child.kill()
            child.terminate()
            try:
                async with asyncio.timeout(min(spec.stop_grace_s, max_grace_s)):
                    await child.ended.wait()
            except TimeoutError:
                forced = True
                child.kill()
                await child.ended.wait()
        self._on_event(Stopped(spec=spec, exit=child.exit(), forced=forced or self._hurried))

    async def _keep_running(self, managed: _Managed) -> None:
        """Runs one incarnation after another, until stopping."""
        delay_s: float | None = None
        is_restart = False
        while not self._stopping.is_set():
            end = await self._run_once(managed, is_restart=is_restart)
            if self._stopping.is_set():
                return
            if not managed.first_ready.done():
                managed.first_ready.set_exception(StartFailed(_start_failure(managed.spec, end)))
                return
            delay_s = self._backoff.delay_s(delay_s, end.served_s)
            self._on_event(Died(spec=managed.spec, exit=end, restart_in_s=delay_s))
            is_restart = True
            try:
                async with asyncio.timeout(delay_s):
                    await self._stopping.wait()
            except TimeoutError:
                continue

    def _start_process(self, spec: ProcessSpec, environment: Mapping[str, str], output: int) -> ChildProcess:
        forked = None
        if spec.is_forked and self._forks is not None:
            forked = self._forks.fork(spec.argv, environment, output)
        return forked or execute(spec, environment, output)

    async def _run_once(self, managed: _Managed, *, is_restart: bool) -> Exit:
        """Runs one incarnation from start to end."""
        spec = managed.spec
        settled = None if self._forks is None or not spec.is_forked else self._forks.settled.wait()
        if settled is not None and not await finished_before(self._stopping, settled):
            return Exit(code=0, ran_s=0.0, served_s=None, reason="")
        try:
            child = Child(spec, lambda text: self._on_event(StatusChanged(spec=spec, text=text)), self._start_process)
        except OSError as error:
            return Exit(code=1, ran_s=0.0, served_s=None, reason=f"error: Cannot start {spec.name}: {error}.")
        managed.child = child
        failure = ""
        try:
            self._on_event(ProcessStarted(spec=spec, pid=child.pid))
            if await _became_ready(spec, child):
                child.became_ready()
                self._on_event(BecameReady(spec=spec, took_s=child.ran_s, is_restart=is_restart))
                if not managed.first_ready.done():
                    managed.first_ready.set_result(None)
            if await finished_before(child.ended, child.silent(spec.hang_timeout_s)):
                raise _Hangs(f"{spec.name} hangs: it has given no sign of life for {spec.hang_timeout_s:g} s.")
        except (_NotReady, _Hangs) as error:
            failure = f"error: {error}"
        finally:
            child.kill()
            await child.ended.wait()
        return replace(child.exit(), reason=failure) if failure else child.exit()


class _Hangs(Exception):
    """The process was ready and has stopped to report that it makes progress."""


class _NotReady(Exception):
    """The process still ran when its time to become ready was over, or its probe failed."""


async def _became_ready(spec: ProcessSpec, child: Child) -> bool:
    """Returns True once the process is ready, False when it ended first. Raises `_NotReady` with the reason."""
    readiness = child.said_ready.wait() if spec.probe is None else spec.probe()
    try:
        async with asyncio.timeout(spec.ready_timeout_s):
            return await finished_before(child.ended, readiness)
    except TimeoutError:
        status = f"; its last status was {child.status!r}" if child.status else ""
        raise _NotReady(f"{spec.name} was not ready within {spec.ready_timeout_s:g} s{status}.") from None
    except PdserveError as error:
        raise _NotReady(str(error)) from error


def _start_failure(spec: ProcessSpec, end: Exit) -> str:
    """One line: the error that the process reported, else how it ended."""
    if end.reason.startswith("error:"):
        return end.reason.removeprefix("error:").strip()
    said = f": {end.reason}" if end.reason else ""
    guess = "; did the machine run out of memory?" if end.code == -signal.SIGKILL else ""
    return f"{spec.name} {end.describe()} before it was ready{said}{guess} (log: {spec.log_path})"


@asynccontextmanager
async def supervising(
    on_event: Callable[[ProcessEvent], None], *, backoff: BackoffPolicy | None = None
) -> AsyncIterator[Supervisor]:
    """A supervisor whose processes are all gone when the block ends, however it ends."""
    async with service_group() as tasks:
        yield Supervisor(tasks, on_event, backoff or BackoffPolicy())
