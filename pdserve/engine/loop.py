"""The step thread: runs steps while there is work, and calls from other threads in between."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import Any, Generic, TypeVar

import torch

from pdserve.base.errors import Draining, SetupError
from pdserve.base.ids import RequestId
from pdserve.engine.runner import Runner
from pdserve.engine.scheduler import Scheduler
from pdserve.engine.step import LayersWritten, StepOutput
from pdserve.engine.stepper import Stepper

T = TypeVar("T")

#: Innermost frames that `StepLoop.position` shows.
_MAX_FRAMES = 8

#: Time after which compiling is a hang, too.
MAX_COMPILING_S = 3600.0
#: Functions that compile kernels, by module.
_COMPILERS = {("triton.compiler.compiler", "compile"), ("triton.runtime.build", "_build")}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopConfig:
    """CPUs and threads that the step thread uses."""

    #: CPUs to which the thread, and the compute threads it starts, are pinned; None: not pinned. Linux only.
    compute_cpus: tuple[int, ...] | None = None
    #: Compute threads of one operation; None: torch decides.
    num_threads: int | None = None
    name: str = "step"
    #: Called on the thread with True when it wakes up, and with False when it goes to sleep or ends. It starts awake.
    on_busy: Callable[[bool], None] = lambda busy: None


class _Call(Generic[T]):
    """A function queued for the step thread."""

    def __init__(self, fn: Callable[[], T]) -> None:
        self.future: Future[T] = Future()
        self._fn = fn

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self._fn())
        except BaseException as error:  # noqa: BLE001 - any error belongs to the caller that waits
            self.future.set_exception(error)

    def refuse(self) -> None:
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(Draining("The step loop has ended; this worker no longer computes."))


class StepLoop:
    """Runs steps while the scheduler has work and sleeps otherwise. Only its thread touches engine state."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        publish: Callable[[StepOutput], None],
        on_fatal: Callable[[BaseException], None],
        on_layers: Callable[[LayersWritten], None] | None = None,
        config: LoopConfig | None = None,
    ) -> None:
        """`publish`, `on_layers` and `on_fatal` are called on the step thread, which ends after `on_fatal`.

        `on_layers` receives the reports that plans request, during a forward pass. All earlier steps have been
        published by then.
        """
        self._scheduler = scheduler
        self._prepare = partial(runner.prepare, is_idle=True)
        self._stepper = Stepper(scheduler, runner, publish, on_layers)
        self._on_fatal = on_fatal
        self._config = config or LoopConfig()
        self._calls: SimpleQueue[_Call[Any]] = SimpleQueue()
        self._gate = threading.Lock()
        self._closed = False
        self._stopping = False
        #: Time from which on there has been work or a call; None while the thread sleeps or has ended.
        self._awake_since: float | None = None
        #: When the thread was last seen compiling.
        self._compiled_at = 0.0
        self._thread = threading.Thread(target=self._run, name=self._config.name, daemon=True)

    def start(self) -> None:
        """Start the thread. Raises `SetupError` when `compute_cpus` are not available."""
        cpus = self._config.compute_cpus
        if cpus is not None:
            if not hasattr(os, "sched_setaffinity"):
                raise SetupError("compute_cpus is only supported on Linux; leave it unset on this system.")
            if not cpus or not set(cpus) <= os.sched_getaffinity(0):
                raise SetupError(
                    f"compute_cpus is {sorted(cpus)}, but must be one or more of the CPUs that this process may use: "
                    f"{sorted(os.sched_getaffinity(0))}."
                )
        self._thread.start()

    @property
    def is_awake(self) -> bool:
        """Whether the thread runs steps or calls. Any thread may read it."""
        return self._awake_since is not None

    @property
    def stalled_s(self) -> float:
        """Age of the running step or call, or of the last step that computed while there is work; 0 without any.

        Steps that compute nothing do not count. It starts anew each time that it is read while the thread compiles, for
        up to `MAX_COMPILING_S`. Any thread may read it.
        """
        since = self._awake_since
        if since is None:
            return 0.0
        now, started_at = perf_counter(), max(since, self._stepper.computed_at)
        if now - started_at < MAX_COMPILING_S and self.is_compiling:
            self._compiled_at = now
        return max(0.0, now - max(started_at, self._compiled_at))

    @property
    def is_compiling(self) -> bool:
        """Whether the thread compiles a kernel, which may take minutes. Any thread may ask."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        while frame is not None:
            if (frame.f_globals.get("__name__"), frame.f_code.co_name) in _COMPILERS:
                return True
            frame = frame.f_back
        return False

    @property
    def requests(self) -> frozenset[RequestId]:
        """The requests of the last step. To be read by other threads once this one has ended."""
        return self._stepper.requests

    @property
    def position(self) -> str:
        """Where the thread is at present: its innermost frames, as `function (file:line)`."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        if frame is None:
            return "ended"
        frames = traceback.extract_stack(frame)[: -_MAX_FRAMES - 1 : -1]
        return " < ".join(f"{each.name} ({os.path.basename(each.filename)}:{each.lineno})" for each in frames)

    def stop(self) -> None:
        """End the thread after the current step and wait for it. Calls not yet run fail with `Draining`."""
        if self._thread.is_alive():
            self.call(self._request_stop)
            self._thread.join()
        self._close()

    def call(self, fn: Callable[[], T]) -> Future[T]:
        """Run `fn` on the step thread between steps, waking it if asleep. The future gets its result or exception.

        No step is in flight while it runs, not even on a device.
        """
        call = _Call(fn)
        with self._gate:
            if self._closed:
                call.refuse()
            else:
                self._calls.put(call)
        return call.future

    def end(self, request_id: RequestId, fn: Callable[[], T]) -> Future[T]:
        """Like `call`, for a call that ends a request. A step that computes nothing else is not completed first."""
        ended = self._stepper.ended_requests
        ended.add(request_id)  # Before the call is queued: once it has run, another request may have the id.
        future = self.call(fn)
        future.add_done_callback(lambda _: ended.discard(request_id))
        return future

    def _run(self) -> None:
        try:
            self._pin_to_cpus()
            with torch.inference_mode():
                while not self._stopping:
                    self._run_calls()
                    if self._scheduler.has_work() and not self._stopping:
                        self._stepper.step(self._calls.empty)
        except BaseException as error:  # noqa: BLE001 - no request can be blamed: the worker reports it and ends
            self._on_fatal(error)
        finally:
            self._awake_since = None
            self._config.on_busy(False)
            self._close()

    def _run_calls(self) -> None:
        """Run the queued calls. Without any, sleep until there is one, unless the scheduler has work."""
        has_work = self._scheduler.has_work()
        if has_work and self._calls.empty():
            return
        # What a call publishes must not overtake the output of the step before it.
        self._stepper.publish()
        if not has_work:
            self._awake_since = perf_counter()
            self._next_call().run()
        try:
            while not self._stopping:
                self._calls.get_nowait().run()
        except Empty:
            return

    def _next_call(self) -> _Call[Any]:
        while self._calls.empty() and self._scheduler.load().is_idle and self._prepare():
            self._awake_since = perf_counter()
        try:
            return self._calls.get_nowait()
        except Empty:
            self._awake_since = None
            self._config.on_busy(False)
        call = self._calls.get()
        self._awake_since = perf_counter()
        self._config.on_busy(True)
        return call

    def _pin_to_cpus(self) -> None:
        """Pin this thread first: the compute threads that torch starts from it inherit its CPUs."""
        if self._config.compute_cpus is not None:
            os.sched_setaffinity(0, self._config.compute_cpus)
        if self._config.num_threads is not None:
            torch.set_num_threads(self._config.num_threads)

    def _request_stop(self) -> None:
        self._stopping = True

    def _close(self) -> None:
        with self._gate:
            self._closed = True
        try:
            while True:
                self._calls.get_nowait().refuse()
        except Empty:
            return
