"""Asks requests of a decode worker to leave when its blocks run out, before one is preempted if possible.

The youngest leaves, as the youngest would be preempted: routers move it while it runs, if another worker has room for
it. If none has, everything stays, and is preempted when its turn comes.
"""

from __future__ import annotations

import asyncio

from decode_svc.moves import Moves
from decode_svc.session_events import SessionEvent
from pdserve.base.errors import Draining
from pdserve.base.ids import RequestId
from pdserve.engine.step import Load, StepOutput
from pdserve.v1 import decode_pb2 as pb
from pdserve.worker.serve.inboxes import Inboxes
from pdserve.worker.serve.worker import Worker

#: Free blocks for each running sequence, below which one should leave: time enough for a move.
_BLOCKS_EACH = 2
#: A request with at most this many tokens left ends, and frees its blocks, before it could have moved.
_SOON = 48
#: Pause between two requests that should leave, and time after which the same one should again.
_PAUSE_S, _AGAIN_S = 0.25, 4.0
_REASON = "full"


class ReliefPolicy:
    """Which request should leave, and when. Pure; times are of one monotonic clock, in seconds."""

    def __init__(self) -> None:
        self._requested_at: dict[RequestId, float] = {}
        self._next_at = float("-inf")

    def is_due(self, load: Load, now: float) -> bool:
        """Whether blocks run short and one should leave. The next one waits for the pause."""
        if load.num_running < 2 or load.free_blocks >= _BLOCKS_EACH * load.num_running or now < self._next_at:
            return False
        self._next_at = now + _PAUSE_S
        return True

    def choose(self, tokens_left: dict[RequestId, int], now: float) -> RequestId | None:
        """The youngest request that still runs for some time. `tokens_left`: in the order of admission."""
        self._requested_at = {each: at for each, at in self._requested_at.items() if each in tokens_left}
        for request_id, count in reversed(tokens_left.items()):
            if count > _SOON and now - self._requested_at.get(request_id, float("-inf")) >= _AGAIN_S:
                self._requested_at[request_id] = now
                return request_id
        return None


class Relief:
    """The I/O of `ReliefPolicy`. Belongs to the event loop."""

    def __init__(self, worker: Worker, moves: Moves, inboxes: Inboxes[SessionEvent]) -> None:
        self._worker = worker
        self._moves = moves
        self._inboxes = inboxes
        self._policy = ReliefPolicy()

    def after_step(self, output: StepOutput) -> None:
        """What the step has preempted may leave. If blocks run short, another one may."""
        for request_id in output.events.preempted:
            self._request_leave(request_id)
        if self._policy.is_due(output.load, _now()) and not self._worker.tasks.stopping:
            self._worker.tasks.start(self._relieve(), name="relief")

    async def _relieve(self) -> None:
        try:
            tokens_left = await self._worker.run(self._moves.tokens_left)
        except Draining:  # The step loop has ended, and with it all that could leave.
            return
        request_id = self._policy.choose(tokens_left, _now())
        if request_id is not None:
            self._request_leave(request_id)

    def _request_leave(self, request_id: RequestId) -> None:
        self._inboxes.put(request_id, pb.DecodeResponse(leave=pb.LeaveRequested(reason=_REASON)))


def _now() -> float:
    return asyncio.get_running_loop().time()
