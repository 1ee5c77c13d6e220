"""Lets a worker note that it fails by itself when a signal such as SIGSEGV ends it, before its connections close.

The handler is in C++, because no code of Python runs in a thread that has failed. It holds that thread until the event
loop has answered. A worker without the C++ kernels ends at once, and its death counts as one from outside.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from kernels.cpu import native
from pdserve.base.logs import get_logger

log = get_logger(__name__)

#: Time for which a failed thread is held, if the event loop does not answer.
WAIT_S = 2.0


@asynccontextmanager
async def reporting_fatal_signals(on_fatal: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """During the block, a fatal signal that the process causes itself waits for `on_fatal`."""
    extension = native.load()
    if extension is None:
        yield
        return
    loop = asyncio.get_running_loop()
    (reports, report), (answers, answer) = os.pipe(), os.pipe()
    noting: list[asyncio.Task[None]] = []

    def read_report() -> None:
        # The byte is read at once: while it is there, the loop calls this again, and a second read would block.
        [number] = os.read(reports, 1)
        noting.append(loop.create_task(_note(number, answer, on_fatal)))

    loop.add_reader(reports, read_report)
    extension.report_fatal_signals(report, answers, int(WAIT_S * 1000))
    try:
        yield
    finally:
        extension.report_fatal_signals(-1, -1, 0)
        loop.remove_reader(reports)
        for descriptor in (reports, report, answers, answer):
            os.close(descriptor)


async def _note(number: int, answer: int, on_fatal: Callable[[], Awaitable[None]]) -> None:
    try:
        await on_fatal()
        log.error("fatal_signal", signal=signal.Signals(number).name)
    finally:
        os.write(answer, b"\0")
