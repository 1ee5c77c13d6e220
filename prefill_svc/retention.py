"""Prompts whose blocks are wanted again if their decode worker is lost: they are evicted after others.

Retained blocks are free, and no prompt waits for them. A retention is an open call of a router: it ends with the
request, and with the router.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Items
from contextlib import suppress

from pdserve.base.errors import PdserveError
from pdserve.base.ids import AttemptId, BlockHash
from pdserve.engine.block_pool import BlockPool
from pdserve.net.streams import PeerLeft
from pdserve.worker.serve.inboxes import Inbox, Inboxes
from pdserve.worker.serve.worker import Worker
from prefill_svc.session import GaveWay, PromptEvent

#: Share of the blocks that may be retained. The others follow their last use alone, as prefixes that prompts share do.
_MAX_SHARE = 0.5
#: Calls that retain something: each holds the message with its prompt.
_MAX_PROMPTS = 512


class RetainedPrompts:
    """The retained prompts, the oldest first. Belongs to the step thread."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._max_hashes = int(pool.num_blocks * _MAX_SHARE / pool.num_groups)
        self._hashes: OrderedDict[AttemptId, Items[BlockHash]] = OrderedDict()

    def add(self, attempt_id: AttemptId, hashes: Items[BlockHash]) -> list[AttemptId]:
        """Retain a prompt, its head alone if it is longer than the share. Returns the older ones that gave way."""
        hashes = hashes[: self._max_hashes]
        self._pool.retain(hashes)
        self._hashes[attempt_id] = hashes
        given_way = []
        while self._pool.num_retained > self._max_hashes or len(self._hashes) > _MAX_PROMPTS:
            oldest = next(iter(self._hashes))
            self.end(oldest)
            given_way.append(oldest)
        return given_way

    def end(self, attempt_id: AttemptId) -> None:
        """Retain a prompt no longer, if it has not given way before."""
        self._pool.end_retention(self._hashes.pop(attempt_id, ()))


class Retention:
    """The calls that retain prompts. Belongs to the event loop."""

    def __init__(self, worker: Worker, inboxes: Inboxes[PromptEvent]) -> None:
        """`inboxes`: of the calls."""
        self._worker = worker
        self._inboxes = inboxes
        self._prompts = RetainedPrompts(worker.model.pool)
        #: Those of the calls that wait.
        self._waiting: dict[AttemptId, Inbox[PromptEvent]] = {}

    async def until_over(self, inbox: Inbox[PromptEvent], hashes: Items[BlockHash]) -> None:
        """Retains a prompt that is handed over until its call is cancelled or replaced, or it has to give way."""
        prompts, attempt_id, given_way = self._prompts, inbox.attempt_id, list[AttemptId]()
        self._waiting[attempt_id] = inbox
        try:
            try:
                await self._worker.run(lambda: given_way.extend(prompts.add(attempt_id, hashes)))
            finally:  # Cancelled or not, they are retained no longer.
                for older in given_way:
                    self._inboxes.put(*older, GaveWay())
            with suppress(PdserveError, PeerLeft):
                while not isinstance(await inbox.next(), GaveWay):
                    pass
        finally:
            del self._waiting[attempt_id]
            await self._worker.run(lambda: prompts.end(attempt_id))

    def end_all(self) -> None:
        """Ends all calls."""
        for inbox in self._waiting.values():
            inbox.put(GaveWay())
