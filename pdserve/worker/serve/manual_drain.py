"""A worker that an operator takes out of service, and back, while its process goes on."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from pdserve.base.errors import Draining
from pdserve.base.ids import WorkerId
from pdserve.net.admin import Health
from pdserve.observe import audit
from pdserve.worker.serve.active_calls import ActiveCalls
from pdserve.worker.serve.worker import TierService

#: What /readyz and the worker's record say.
DRAINED = "drained by an operator"


class ManualDrain:
    """Belongs to the event loop. A worker that shuts down after SIGTERM is not taken back into service."""

    def __init__(
        self,
        worker_id: WorkerId,
        service: TierService,
        calls: ActiveCalls,
        health: Health,
        publish: Callable[[], Awaitable[None]],
    ) -> None:
        """`publish` reports a changed readiness to routers and to the platform."""
        self._worker_id = worker_id
        self._service = service
        self._calls = calls
        self._health = health
        self._publish = publish

    @property
    def is_drained(self) -> bool:
        """Whether an operator has taken the worker out of service."""
        return self._health.not_ready == DRAINED

    async def start(self) -> None:
        """Refuses new requests, and drains the service without a time limit. No effect on a worker that is drained.

        Raises: Draining when the worker shuts down.
        """
        self._require_serving()
        if self.is_drained:
            return
        audit.action("drain_started", worker=self._worker_id, requests=self._calls.count)
        self._health.not_ready = DRAINED
        self._calls.drain()
        self._service.drain(0.0)
        await self._publish()

    async def undo(self) -> None:
        """The worker serves again. No effect on a worker that serves. Raises: Draining when the worker shuts down."""
        self._require_serving()
        if not self.is_drained:
            return
        audit.action("drain_undone", worker=self._worker_id, requests_left=self._calls.count)
        self._health.not_ready = None
        self._service.stay()
        self._calls.accept()
        await self._publish()

    def _require_serving(self) -> None:
        if self._health.not_ready not in (None, DRAINED):
            raise Draining(f"The worker is not serving: {self._health.not_ready}. Drain another one.")
