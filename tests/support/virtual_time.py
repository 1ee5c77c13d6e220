"""Event loops with a clock of their own, so that leases and deadlines expire without being waited for.

`@pytest.mark.virtual_time` selects a loop whose clock jumps to the next timer instead of waiting for it.
Leases and deadlines then expire at once, in order, and however busy the machine is. It suits tests whose peers all live
in this loop: another process or a thread of the test's own would see no time pass.

`@pytest.mark.advanced_time` selects a loop with the real clock, which a test moves forward with `advance`. It suits
tests with threads, gRPC or other processes, whose work takes real time.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, TypeVar

T = TypeVar("T")


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """A selector event loop with a clock of its own, which starts at 0 and is in seconds.

    The clock stands still while callbacks run, while I/O is ready and while calls in executors are in flight.
    """

    def __init__(self) -> None:
        self._now = 0.0
        self._num_executor_calls = 0
        super().__init__(_JumpingSelector(self._jump))

    def time(self) -> float:
        return self._now

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        future = super().run_in_executor(executor, func, *args)
        self._num_executor_calls += 1
        future.add_done_callback(self._executor_call_done)
        return future

    def _executor_call_done(self, _future: asyncio.Future[Any]) -> None:
        self._num_executor_calls -= 1

    def _jump(self, seconds: float) -> bool:
        """Moves the clock forward, unless a call in an executor is in flight: its end comes before any timer."""
        if self._num_executor_calls:
            return False
        self._now += seconds
        return True


class _JumpingSelector(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    """A selector that skips the time it would have waited for when no I/O is ready."""

    def __init__(self, jump: Callable[[float], bool]) -> None:
        super().__init__()
        self._jump = jump

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout <= 0:
            return super().select(timeout)
        ready = super().select(0)
        if ready or self._jump(timeout):
            return ready
        return super().select(None)


class AdvancedTimeLoop(asyncio.SelectorEventLoop):
    """A selector event loop whose clock runs in real time, and is moved forward by `advance`."""

    def __init__(self) -> None:
        self._advanced_s = 0.0
        super().__init__()

    def time(self) -> float:
        return super().time() + self._advanced_s

    def advance(self, seconds: float) -> None:
        """Timers that are due by then are called when the running task next waits."""
        self._advanced_s += seconds


def advance(seconds: float) -> float:
    """Moves the running loop's clock forward; returns its new time. Needs `advanced_time`."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, AdvancedTimeLoop), "mark the test with advanced_time"
    loop.advance(seconds)
    return loop.time()
