"""Reports a step loop that hangs, so that the worker gets no more requests and its liveness probe fails."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from pdserve.base.admin import Health
from pdserve.base.logs import get_logger

log = get_logger(__name__)

#: Time between two looks.
INTERVAL_S = 1.0


class WatchedLoop(Protocol):
    """What is watched of `StepLoop`."""

    @property
    def stalled_s(self) -> float:
        """Seconds without progress while there is work."""

    @property
    def position(self) -> str:
        """Where the thread is."""


async def watch_stalls(
    loop: WatchedLoop, health: Health, *, timeout_s: float, on_change: Callable[[], Awaitable[None]]
) -> None:
    """Sets and clears `Health.stalled` until cancelled; `on_change` publishes that readiness may have changed.

    It starts after warm-up, since loading and compiling may take any time. A step that ends after all, such as a long
    compilation, makes the worker ready again.
    """
    while True:
        stalled_s = loop.stalled_s
        is_stalled = stalled_s >= timeout_s
        if is_stalled and health.stalled is None:
            log.error("step_loop_stalled", stalled_s=round(stalled_s), timeout_s=timeout_s, at=loop.position)
            health.stalled = (
                f"the step loop has made no progress for {stalled_s:.0f} s, and the limit is {timeout_s:g} s; restart "
                "the worker, or raise --stall-timeout-s if its steps take that long"
            )
            await on_change()
        elif not is_stalled and health.stalled is not None:
            log.warning("step_loop_recovered")
            health.stalled = None
            await on_change()
        await asyncio.sleep(INTERVAL_S)
