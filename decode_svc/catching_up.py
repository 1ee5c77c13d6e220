"""Tokens of the worker that a request leaves, on their way into the sequences of the worker that it goes to."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from decode_svc.moves import Moves
from decode_svc.session_events import MAX_COMMAND_BYTES, cost_of, flooded
from pdserve.base.ids import RequestId
from pdserve.base.sampling import ChoiceTokens
from pdserve.base.tasks import ServiceGroup
from pdserve.base.wire import tokens_from_wire
from pdserve.v1 import decode_pb2 as pb
from pdserve.worker.serve.worker import Worker


class CatchingUp:
    """Belongs to the event loop.

    All tokens that wait are taken in between the same two steps. With a message for each, a worker with longer steps
    would stay behind for good.
    """

    def __init__(self, worker: Worker, moves: Moves, request_id: RequestId) -> None:
        self._worker = worker
        self._moves = moves
        self._request_id = request_id
        self._known: deque[ChoiceTokens] = deque()
        self._waiting_bytes = 0
        self._is_running = False

    def take(self, command: pb.DecodeRequest, tasks: ServiceGroup) -> None:
        """The client has these tokens. Errors of `Moves.catch_up` end `tasks`. Raises `RequestError` for a flood."""
        self._waiting_bytes += cost_of(command)
        if self._waiting_bytes > MAX_COMMAND_BYTES:
            raise flooded(self._request_id, self._waiting_bytes)
        self._known.extend(map(tokens_from_wire, command.catch_up.choices))
        if not self._is_running:
            self._is_running = True
            tasks.start(self._run(), name=f"catching up {self._request_id}")

    async def _run(self) -> None:
        while self._known:
            self._waiting_bytes = 0
            await self._worker.run(lambda: self._moves.catch_up(self._request_id, list(self._drain())))
        self._is_running = False

    def _drain(self) -> Iterable[ChoiceTokens]:
        """Called on the step thread: what has come until then counts."""
        while self._known:
            yield self._known.popleft()
