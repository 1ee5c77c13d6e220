"""The claim of one record, which is given back however its work ends."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator

from pdserve.base.errors import StoreError
from pdserve.base.tasks import run_to_completion
from router_svc.state.state_store import CLAIM_S, StateStore

_RENEWAL_S = CLAIM_S / 4


class Claim:
    """A claim with a holder of its own: nothing else on this router has it, nor another router."""

    def __init__(self, state: StateStore, key: str) -> None:
        self.key = key
        self.holder = secrets.token_hex(8)
        self._state = state

    async def take(self) -> bool:
        """Claims the record, or renews the claim. False: it is gone or not open, or claimed. Raises `StoreError`."""
        return await self._state.claim(self.key, self.holder)

    async def keep(self) -> None:
        """Renews the claim. Returns once it is lost, since the record is gone, has ended, or is another holder's."""
        while True:
            await asyncio.sleep(_RENEWAL_S)
            with contextlib.suppress(StoreError):  # The store logs outages.
                if not await self.take():
                    return

    async def give_back(self) -> None:
        """Gives it back, if it is held. While the store is away, a claim in Redis expires instead."""
        with contextlib.suppress(StoreError):
            await self._state.release(self.key, self.holder)


@contextlib.asynccontextmanager
async def claiming(state: StateStore, key: str) -> AsyncIterator[Claim]:
    """A claim that can be taken within the block. Leaving it gives it back: that of a directory does not expire."""
    claim = Claim(state, key)
    try:
        yield claim
    finally:
        await run_to_completion(claim.give_back())
