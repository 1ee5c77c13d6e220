"""Counts the requests a worker serves, and refuses new ones while it loads or drains."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from pdserve.base.errors import Draining


class ActiveCalls:
    """The requests a worker is serving. Belongs to the event loop."""

    def __init__(self) -> None:
        self._count = 0
        self._refusal: str | None = "The worker is still loading. Retry on another worker."
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def count(self) -> int:
        """Number of requests being served."""
        return self._count

    def accept(self) -> None:
        """From now on requests are accepted."""
        self._refusal = None

    def drain(self) -> None:
        """From now on requests are refused."""
        self._refusal = "The worker drains, and may be shutting down. Retry on another worker."

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Counts one request until the block ends. Raises `Draining` when requests are refused."""
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
