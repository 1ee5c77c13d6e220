"""Empties a decode worker: hands back waiting requests, and asks running ones to move to other workers."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from decode_svc.migration.drain_policy import DrainPolicy
from decode_svc.migration.requests import MigratingRequests
from decode_svc.session_events import SessionEvent
from pdserve.base.errors import Draining
from pdserve.v1 import decode_pb2 as pb
from pdserve.worker.serve.inboxes import Failed, Inboxes
from pdserve.worker.serve.worker import Worker

#: Interval at which a worker that drains looks for requests that should leave.
_CHECK_S = 0.1
#: Why requests leave.
_REASON = "drain"


class Drain:
    """At most one drain at a time; a new one replaces it. Belongs to the event loop."""

    def __init__(self, worker: Worker, migrating: MigratingRequests, inboxes: Inboxes[SessionEvent]) -> None:
        self._worker = worker
        self._migrating = migrating
        self._inboxes = inboxes
        self._policy: DrainPolicy | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self, within_s: float) -> None:
        """Asks requests that would not end within half of this time to leave; with 0, asks all, one after the other."""
        if self._task is not None:
            self._task.cancel()
        self._policy = DrainPolicy(_now() + within_s if within_s else None)
        self._task = self._worker.tasks.start(self._run(self._policy), name="drain")

    def stop(self) -> None:
        """Requests may stay after all. Moves that have begun go on. No effect without a drain."""
        if self._task is None or self._policy is None:
            return
        self._task.cancel()
        for attempt_id in self._policy.requested:
            withdrawn = pb.LeaveRequested(reason=_REASON, is_withdrawn=True)
            self._inboxes.put(*attempt_id, pb.DecodeResponse(leave=withdrawn))
        self._task = self._policy = None

    async def _run(self, policy: DrainPolicy) -> None:
        # `Draining` says that the step loop has ended, and with it every request that could leave.
        with suppress(Draining):
            await self._empty(policy)

    async def _empty(self, policy: DrainPolicy) -> None:
        for attempt_id in await self._worker.run(self._migrating.waiting):
            self._inboxes.put(*attempt_id, Failed(error=Draining("The worker drains. Retry on another one.")))
        while True:
            tokens_left = await self._worker.run(self._migrating.tokens_left)
            for attempt_id in policy.next(tokens_left, step_s=self._worker.steps.last_step_s, now=_now()):
                self._inboxes.put(*attempt_id, pb.DecodeResponse(leave=pb.LeaveRequested(reason=_REASON)))
            await asyncio.sleep(_CHECK_S)


def _now() -> float:
    return asyncio.get_running_loop().time()
