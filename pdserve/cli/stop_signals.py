"""Ctrl-C, SIGTERM and a closed terminal as an event; a repeated signal calls back."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable

from pdserve.base.tasks import service_group


class StopSignals:
    """Handles signals from construction on: the first sets `requested`, each further one calls `on_again`."""

    def __init__(self, on_again: Callable[[], None]) -> None:
        self.requested = asyncio.Event()
        self._on_again = on_again
        loop = asyncio.get_running_loop()
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # Otherwise it was started with nohup.
            numbers.append(signal.SIGHUP)
        for number in numbers:
            loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        if self.requested.is_set():
            self._on_again()
        self.requested.set()


async def finished_before(stop: asyncio.Event, work: Awaitable[object]) -> bool:
    """Runs `work` to its end, or cancels it and returns False when `stop` is set first. Raises what `work` raises."""
    async with service_group() as group:
        task = group.start(work, name="work")
        stopped = group.start(stop.wait(), name="stop")
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        return task.done()
