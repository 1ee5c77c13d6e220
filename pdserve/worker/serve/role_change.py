"""Changes of a worker's role while it runs: what must happen at once, and in which order."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import get_args

from pdserve.base.errors import Draining, RequestError
from pdserve.net.admin import Health
from pdserve.observe import audit
from pdserve.peers.workers import Tier
from pdserve.worker.serve.metrics import ROLE_REASONS
from pdserve.worker.serve.worker import TierService, Worker


class RoleChange:
    """Belongs to the event loop. Weights, blocks, id and epoch stay as they are, and so does what requests hold."""

    def __init__(
        self, worker: Worker, service: TierService, health: Health, publish: Callable[[], Awaitable[None]]
    ) -> None:
        """`publish` reports the changed record to routers."""
        self._worker = worker
        self._service = service
        self._health = health
        self._publish = publish
        worker.metrics.former_role_requests.set_function(lambda: self.former_requests)

    @property
    def former_requests(self) -> int:
        """Requests that came when the worker had the other role."""
        return sum(self._worker.calls.count_of(tier) for tier in get_args(Tier) if tier != self._worker.tier)

    async def change(self, role: str, reason: str) -> None:
        """When this returns, only requests of `role` are accepted. No effect on a worker that has this role already.

        Raises: RequestError for a worker with one role for life, Draining for one that is not ready.
        """
        worker = self._worker
        if role not in get_args(Tier) or reason not in ROLE_REASONS:
            raise RequestError(f"{role!r} because of {reason!r} is no change of role. Roles are prefill and decode.")
        if role == worker.tier:
            return
        if self._health.not_ready is not None:
            raise Draining(f"The worker is not serving: {self._health.not_ready}. Change its role when it is.")
        tier: Tier = "prefill" if role == "prefill" else "decode"
        self._service.take_role(tier)
        audit.action("role_changed", worker=worker.worker_id, role=tier, reason=reason, requests=worker.calls.count)
        worker.tier = tier
        worker.calls.accept_only(tier)
        worker.show_role(self._service)
        worker.metrics.role_changed(tier, reason)
        await self._publish()
