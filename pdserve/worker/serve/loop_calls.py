"""Calls from one thread to the event loop of another, in order, and never losing the interpreter's lock."""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections import deque
from collections.abc import Callable
from typing import Any

_ONE = (1).to_bytes(8, "little")


class LoopCalls:
    """`loop.call_soon_threadsafe` for a thread that must not be held up.

    That writes to a socket and lets the interpreter's lock go meanwhile. The loop, awake at once, takes it, and the
    caller waits until the loop sleeps again: 0.2 ms of every step of a worker. Here the lock is kept until the caller
    lets it go by itself, which a step does when it begins to compute. Without eventfd it is the slower way.
    """

    def __init__(self) -> None:
        """On the event loop that runs the calls."""
        self._loop = asyncio.get_running_loop()
        self._calls: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._event = -1
        if hasattr(os, "eventfd"):
            self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._write = ctypes.PyDLL(None).write
            self._write.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t)
            self._loop.add_reader(self._event, self._on_event)

    def post(self, call: Callable[..., object], *arguments: object) -> None:
        """Have the loop call `call(*arguments)` after all that was posted before. From any thread; never blocks."""
        self._calls.append((call, arguments))
        if self._event >= 0:
            self._write(self._event, _ONE, len(_ONE))
        else:
            self._loop.call_soon_threadsafe(self.deliver)

    def deliver(self) -> None:
        """On the loop: what has been posted, now, for who must not see the loop's other news before."""
        while self._calls:
            call, arguments = self._calls.popleft()
            try:
                call(*arguments)
            except Exception as error:  # noqa: BLE001 - it is nobody's who happens to be here; the others still run
                self._loop.call_exception_handler(
                    {"message": f"a call of a mailbox failed: {call}", "exception": error}
                )

    def close(self) -> None:
        """Deliver the last calls. Nothing may be posted any more."""
        if self._event >= 0:
            self._loop.remove_reader(self._event)
            os.close(self._event)
            self._event = -1
        self.deliver()

    def _on_event(self) -> None:
        os.eventfd_read(self._event)
        self.deliver()
