"""Asks requests of a decode worker to leave when its blocks run out, before one is preempted if possible.

The youngest request is asked, since it would be preempted first. Its router moves it while it runs, if another worker
has room for it. If none has, the request stays, and is preempted when its turn comes. When an operator balances the
load, the requests with the most tokens left are asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from decode_svc.migration.requests import MigratingRequests
from decode_svc.session_events import SessionEvent
from pdserve.base.errors import Draining
from pdserve.base.ids import AttemptId
from pdserve.engine.step import Load, StepOutput
from pdserve.v1 import decode_pb2 as pb
from pdserve.worker.serve.inboxes import Inboxes
from pdserve.worker.serve.worker import Worker

#: Free blocks for each running sequence, below which a request should leave: they last for the time of a move.
_BLOCKS_EACH = 2
#: A request with at most this many tokens left ends, and frees its blocks, before it could have moved.
_SOON = 48
#: Pause between two requests that are asked to leave, and time after which the same request is asked again.
_PAUSE_S, _AGAIN_S = 0.25, 4.0
#: Maximum number of requests that are asked at a time when the load is balanced.
_AT_ONCE = 4
_FULL, _REBALANCE = "full", "rebalance"


class EvictionPolicy:
    """Which request should leave, and when. Pure; times are of one monotonic clock, in seconds."""

    def __init__(self) -> None:
        self._requested_at: dict[AttemptId, float] = {}
        self._next_at = float("-inf")

    def is_due(self, load: Load, now: float) -> bool:
        """Whether blocks run short, so that a request should leave. The next request is due after the pause."""
        if load.num_running < 2 or load.free_blocks >= _BLOCKS_EACH * load.num_running or now < self._next_at:
            return False
        self._next_at = now + _PAUSE_S
        return True

    def choose(self, tokens_left: dict[AttemptId, int], now: float) -> AttemptId | None:
        """The youngest request that still runs for some time. `tokens_left`: in the order of admission."""
        self._requested_at = {each: at for each, at in self._requested_at.items() if each in tokens_left}
        for attempt_id, count in reversed(tokens_left.items()):
            if count > _SOON and now - self._requested_at.get(attempt_id, float("-inf")) >= _AGAIN_S:
                self._requested_at[attempt_id] = now
                return attempt_id
        return None

    def choose_longest(
        self, running: Mapping[AttemptId, tuple[int, int]], num_sequences: int, now: float
    ) -> list[AttemptId]:
        """A few requests with the most tokens left, together with at most `num_sequences` sequences.

        `running`: maximum number of tokens that each request may still have, and its number of sequences.
        """
        self._requested_at = {each: at for each, at in self._requested_at.items() if each in running}
        chosen: list[AttemptId] = []
        for attempt_id, (count, width) in sorted(running.items(), key=lambda each: -each[1][0]):
            is_new = now - self._requested_at.get(attempt_id, float("-inf")) >= _AGAIN_S
            if len(chosen) < _AT_ONCE and count > _SOON and is_new and width <= num_sequences:
                self._requested_at[attempt_id] = now
                num_sequences -= width
                chosen.append(attempt_id)
        return chosen


class Eviction:
    """The I/O of `EvictionPolicy`. Belongs to the event loop."""

    def __init__(self, worker: Worker, migrating: MigratingRequests, inboxes: Inboxes[SessionEvent]) -> None:
        self._worker = worker
        self._migrating = migrating
        self._inboxes = inboxes
        self._policy = EvictionPolicy()

    def after_step(self, output: StepOutput) -> None:
        """Asks requests that the step has preempted to leave. If blocks run short, another request is asked."""
        for attempt_id in output.events.preempted:
            self._request_leave(attempt_id, _FULL)
        if self._policy.is_due(output.load, _now()) and not self._worker.tasks.stopping:
            self._worker.tasks.start(self._evict(), name="eviction")

    async def rebalance(self, num_sequences: int) -> int:
        """Asks requests with at most `num_sequences` sequences to leave. Returns how many. Raises: Draining."""
        running = await self._worker.run(self._migrating.running)
        chosen = self._policy.choose_longest(running, num_sequences, _now())
        for attempt_id in chosen:
            self._request_leave(attempt_id, _REBALANCE)
        return len(chosen)

    async def _evict(self) -> None:
        try:
            tokens_left = await self._worker.run(self._migrating.tokens_left)
        except Draining:  # The step loop has ended, and with it all that could leave.
            return
        attempt_id = self._policy.choose(tokens_left, _now())
        if attempt_id is not None:
            self._request_leave(attempt_id, _FULL)

    def _request_leave(self, attempt_id: AttemptId, reason: str) -> None:
        self._inboxes.put(*attempt_id, pb.DecodeResponse(leave=pb.LeaveRequested(reason=reason)))


def _now() -> float:
    return asyncio.get_running_loop().time()
