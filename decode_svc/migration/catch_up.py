"""Tokens of the worker that a request leaves, on their way into the sequences of the worker that it goes to."""

from __future__ import annotations

from collections import deque

from decode_svc.migration.requests import MigratingRequests
from decode_svc.session_events import WaitingCommands
from pdserve.base.ids import RequestId
from pdserve.base.tasks import ServiceGroup
from pdserve.base.wire import tokens_from_wire
from pdserve.v1 import decode_pb2 as pb
from pdserve.worker.serve.worker import Worker


class CatchUpQueue:
    """Tokens that wait for the step thread. Belongs to the event loop.

    All of them are taken in between the same two steps. If each message waited for a step of its own, a worker with
    longer steps would stay behind for good.
    """

    def __init__(
        self, worker: Worker, migrating: MigratingRequests, request_id: RequestId, backlog: WaitingCommands
    ) -> None:
        """`backlog` counts the commands until the step thread has taken them."""
        self._worker = worker
        self._migrating = migrating
        self._request_id = request_id
        self._backlog = backlog
        self._waiting: deque[pb.DecodeRequest] = deque()
        self._is_running = False

    def take(self, command: pb.DecodeRequest, tasks: ServiceGroup) -> None:
        """Queues tokens that the client has. Errors of `MigratingRequests.catch_up` end `tasks`."""
        self._waiting.append(command)
        if not self._is_running:
            self._is_running = True
            tasks.start(self._run(), name=f"catching up {self._request_id}")

    async def _run(self) -> None:
        while self._waiting:
            for command in await self._worker.run(self._catch_up):
                self._backlog.remove(command)
        self._is_running = False

    def _catch_up(self) -> list[pb.DecodeRequest]:
        """Called on the step thread. Takes all commands that have come until then, and returns them."""
        taken: list[pb.DecodeRequest] = []
        while self._waiting:
            taken.append(self._waiting.popleft())
        known = (tokens_from_wire(choice) for command in taken for choice in command.catch_up.choices)
        self._migrating.catch_up(self._request_id, list(known))
        return taken
