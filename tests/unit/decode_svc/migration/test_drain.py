"""A decode worker that is emptied asks its requests to leave, and takes that back when it is to stay."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

from decode_svc.migration.drain import Drain
from decode_svc.migration.requests import MigratingRequests
from decode_svc.session_events import SessionEvent
from pdserve.base.errors import Draining
from pdserve.base.ids import AttemptId, RequestId
from pdserve.base.tasks import ServiceGroup, service_group
from pdserve.v1 import decode_pb2 as pb
from pdserve.worker.serve.inboxes import Failed, Inboxes
from pdserve.worker.serve.worker import Worker

TOKENS_LEFT = {AttemptId(RequestId("short"), 1): 1, AttemptId(RequestId("long"), 2): 1000}


class Setup:
    """A worker with two running requests and one that waits. `sent` has what its requests were sent, by request."""

    def __init__(self, tasks: ServiceGroup) -> None:
        self.sent: dict[str, list[Any]] = {}
        self.has_looked = asyncio.Event()

        async def run(fn: Callable[[], Any]) -> Any:
            return fn()

        def tokens_left() -> dict[AttemptId, int]:
            self.has_looked.set()
            return TOKENS_LEFT

        worker = SimpleNamespace(run=run, tasks=tasks, steps=SimpleNamespace(last_step_s=0.01))
        moves = SimpleNamespace(waiting=lambda: [AttemptId(RequestId("waiting"), 1)], tokens_left=tokens_left)

        def put(request_id: RequestId, attempt: int, event: Any) -> None:
            assert attempt == (2 if request_id == "long" else 1)
            self.sent.setdefault(request_id, []).append(event)

        inboxes = SimpleNamespace(put=put)
        self.drain = Drain(cast(Worker, worker), cast(MigratingRequests, moves), cast("Inboxes[SessionEvent]", inboxes))


def leave(*, is_withdrawn: bool = False) -> pb.DecodeResponse:
    return pb.DecodeResponse(leave=pb.LeaveRequested(reason="drain", is_withdrawn=is_withdrawn))


async def test_without_haste_one_request_leaves_and_stays_when_it_is_taken_back() -> None:
    async with service_group() as tasks:
        setup = Setup(tasks)
        setup.drain.start(0.0)
        await setup.has_looked.wait()
        [handed_back] = setup.sent.pop("waiting")
        assert isinstance(handed_back, Failed)
        assert isinstance(handed_back.error, Draining)
        assert setup.sent == {"long": [leave()]}
        setup.drain.stop()
        assert setup.sent == {"long": [leave(), leave(is_withdrawn=True)]}
        setup.drain.stop()
        assert len(setup.sent["long"]) == 2


async def test_with_time_only_long_requests_leave() -> None:
    async with service_group() as tasks:
        setup = Setup(tasks)
        setup.drain.start(10.0)
        await setup.has_looked.wait()
        assert "short" not in setup.sent
        assert setup.sent["long"] == [leave()]
