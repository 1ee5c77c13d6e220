"""Reports a step loop that hangs: in seconds, so that requests go elsewhere; at a limit, so that it is restarted."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from pdserve.base.logs import get_logger
from pdserve.net import notify
from pdserve.net.admin import Health

log = get_logger(__name__)

#: Time between two looks.
INTERVAL_S = 1.0
#: A step hangs when it takes this long, or this many times as long as the longest before it.
HUNG_AFTER_S, HUNG_FACTOR = 10.0, 5.0


class WatchedLoop(Protocol):
    """What is watched of `StepLoop`."""

    @property
    def stalled_s(self) -> float:
        """Seconds without progress while there is work. Compiling counts as progress."""

    @property
    def position(self) -> str:
        """Where the thread is."""


def is_hung(loop: WatchedLoop, *, longest_step_s: float) -> bool:
    """Whether the loop has made no progress for much longer than its steps take. Compiling is no hang."""
    return loop.stalled_s >= max(HUNG_AFTER_S, HUNG_FACTOR * longest_step_s)


async def watch_stalls(
    loop: WatchedLoop,
    health: Health,
    *,
    timeout_s: float,
    on_change: Callable[[], Awaitable[None]],
    longest_step_s: Callable[[], float] = lambda: 0.0,
) -> None:
    """Sets and clears `Health.hung` and `Health.stalled` until cancelled; `on_change` publishes a change of readiness.

    Reports to the supervisor that the worker makes progress, until it is stalled.

    To be started after warm-up, since loading and compiling may take any time. When a step that hung ends after all,
    the worker is ready again.
    """
    while True:
        was_ready = health.is_ready
        _look(loop, health, timeout_s=timeout_s, longest_step_s=longest_step_s())
        if health.is_ready != was_ready:
            await on_change()
        if health.is_live:
            notify.alive()
        await asyncio.sleep(INTERVAL_S)


def _look(loop: WatchedLoop, health: Health, *, timeout_s: float, longest_step_s: float) -> None:
    stalled_s, hung = loop.stalled_s, is_hung(loop, longest_step_s=longest_step_s)
    if stalled_s >= timeout_s and health.stalled is None:
        log.error("step_loop_stalled", stalled_s=round(stalled_s), timeout_s=timeout_s, at=loop.position)
        health.stalled = (
            f"the step loop has made no progress for {stalled_s:.0f} s, and the limit is {timeout_s:g} s; restart "
            "the worker, or raise --stall-timeout-s if its steps take that long"
        )
    elif stalled_s < timeout_s and health.stalled is not None:
        log.warning("step_loop_recovered")
        health.stalled = None
    if hung and health.hung is None:
        log.warning("step_loop_hung", stalled_s=round(stalled_s), at=loop.position)
        health.hung = f"the step loop has made no progress for {stalled_s:.0f} s; requests go to other workers"
    elif not hung and health.hung is not None:
        log.info("step_loop_moves")
        health.hung = None
