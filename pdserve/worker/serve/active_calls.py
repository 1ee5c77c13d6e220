"""Counts what a worker is busy with, refuses more while it drains, and tells when nothing is left."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from pdserve.base.errors import Draining


class ActiveCalls:
    """The requests a worker serves. Belongs to the event loop."""

    def __init__(self) -> None:
        self._count = 0
        self._refusal: str | None = "The worker is still loading; try another one."
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def count(self) -> int:
        """Calls that are being served."""
        return self._count

    def accept(self) -> None:
        """From now on requests are served."""
        self._refusal = None

    def drain(self) -> None:
        """From now on requests are refused."""
        self._refusal = "The worker is shutting down; try another one."

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Holds one request open. Raises `Draining` when none is taken."""
        if self._refusal is not None:
            raise Draining(self._refusal)
        self._count += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._count -= 1
            if not self._count:
                self._idle.set()

    async def wait_idle(self) -> None:
        """Returns when no request is being served."""
        await self._idle.wait()
