"""Counts the requests a worker serves, and refuses new ones while it loads or drains, or has another role."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from pdserve.base.errors import Draining
from pdserve.peers.workers import Tier


class ActiveCalls:
    """The requests a worker is serving. Belongs to the event loop."""

    def __init__(self) -> None:
        #: None: calls that are of no tier.
        self._counts: Counter[Tier | None] = Counter()
        self._refusal: str | None = "The worker is still loading. Retry on another worker."
        #: The only tier of which requests are accepted; None: the worker has one for life.
        self._role: Tier | None = None
        #: Set and replaced whenever a tier has no request left.
        self._emptied = asyncio.Event()

    @property
    def count(self) -> int:
        """Number of requests being served."""
        return self._counts.total()

    def count_of(self, tier: Tier) -> int:
        """Number of requests of a tier being served."""
        return self._counts[tier]

    def accept(self) -> None:
        """From now on requests are accepted."""
        self._refusal = None

    def accept_only(self, role: Tier) -> None:
        """From now on requests of the other tier are refused, whether others are accepted or not."""
        self._role = role

    def drain(self) -> None:
        """From now on requests are refused."""
        self._refusal = "The worker drains, and may be shutting down. Retry on another worker."

    @contextmanager
    def serving(self, tier: Tier | None = None) -> Iterator[None]:
        """Counts one request until the block ends. Raises `Draining` when requests are refused."""
        if self._refusal is not None:
            raise Draining(self._refusal)
        if None not in (tier, self._role) and tier != self._role:
            raise Draining(f"The worker has left the {tier} tier for the {self._role} tier. Retry on another worker.")
        self._counts[tier] += 1
        try:
            yield
        finally:
            self._counts[tier] -= 1
            if not self._counts[tier]:
                self._emptied.set()
                self._emptied = asyncio.Event()

    async def wait_idle(self) -> None:
        """Returns when no request is being served."""
        while self.count:
            await self._emptied.wait()

    async def wait_idle_of(self, tier: Tier) -> None:
        """Returns when no request of the tier is being served."""
        while self._counts[tier]:
            await self._emptied.wait()
