"""A worker that an operator drains takes no request until the drain is undone; one that shuts down stays down."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from pdserve.base.errors import Draining
from pdserve.base.ids import WorkerId
from pdserve.net.admin import Health
from pdserve.worker.serve.active_calls import ActiveCalls
from pdserve.worker.serve.manual_drain import ManualDrain
from pdserve.worker.serve.worker import TierService


class Setup:
    """A worker that serves. `events`: what its service and its readers were told, in order."""

    def __init__(self) -> None:
        self.events: list[object] = []
        self.calls, self.health = ActiveCalls(), Health()
        self.calls.accept()
        self.health.not_ready = None
        service = SimpleNamespace(drain=self.events.append, stay=lambda: self.events.append("stay"))
        self.drain = ManualDrain(WorkerId("w"), cast(TierService, service), self.calls, self.health, self._publish)

    async def _publish(self) -> None:
        self.events.append(self.health.is_ready)


async def test_a_drained_worker_is_not_ready_and_has_all_requests_to_leave_at_once() -> None:
    setup = Setup()
    await setup.drain.start()
    assert setup.drain.is_drained
    assert setup.events == [0.0, False]
    with pytest.raises(Draining), setup.calls.serving():
        pass
    await setup.drain.start()
    assert setup.events == [0.0, False]


async def test_an_undone_drain_leaves_a_worker_that_serves() -> None:
    setup = Setup()
    await setup.drain.undo()
    assert setup.events == []
    await setup.drain.start()
    await setup.drain.undo()
    assert setup.events == [0.0, False, "stay", True]
    with setup.calls.serving():
        assert setup.calls.count == 1


async def test_a_worker_that_shuts_down_is_not_taken_back() -> None:
    setup = Setup()
    await setup.drain.start()
    setup.health.not_ready = "draining"  # SIGTERM
    setup.events.clear()
    for change in (setup.drain.undo, setup.drain.start):
        with pytest.raises(Draining, match="not serving: draining"):
            await change()
    assert setup.events == []
    assert setup.health.not_ready == "draining"
