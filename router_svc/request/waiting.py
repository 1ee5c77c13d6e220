"""A request's waits for workers: until one can take it, or none is to be expected."""

from __future__ import annotations

import asyncio
import contextlib
import random

from pdserve.base.errors import PdserveError
from pdserve.peers.registry import RECORD_TTL_S
from pdserve.peers.workers import WorkerRecord
from router_svc.request.error_for_client import error_for_client
from router_svc.request.placer import Placer
from router_svc.request.recovery import Recovery
from router_svc.routing.cluster import Cluster
from router_svc.routing.placement import Placement

#: Interval between looks at the workers while none of them can take a request: about one heartbeat.
_HEARTBEAT_S = 0.5
#: Time after which the record of a worker without heartbeats has expired.
_GONE_S = RECORD_TTL_S


class Waiting:
    """Waits of one request, each for a change of the workers. Owned by its saga."""

    def __init__(self, cluster: Cluster, placer: Placer, recovery: Recovery, key: str) -> None:
        """Requests with different keys wait for different times, so that they do not return together."""
        self._cluster = cluster
        self._placer = placer
        self._recovery = recovery
        self._key = key

    @staticmethod
    def now() -> float:
        """The clock of `Recovery`."""
        return asyncio.get_running_loop().time()

    async def heartbeat(self, waits: int, until: float | None = None) -> None:
        """Returns with the next change of the workers, or after about one heartbeat. `waits`: how many came before."""
        when = self.now() + _HEARTBEAT_S * random.Random(f"{self._key}/{waits}").uniform(0.75, 1.25)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(when if until is None else min(when, until)):
                await self._cluster.directory.wait_for_change(self._cluster.directory.version)

    async def for_decode(self, refusal: PdserveError) -> Placement:
        """A decode worker to ask again, after each heartbeat. Raises the client's error when there is none to wait for.

        While all workers are full, it is raised once the request has waited long enough for capacity. While the whole
        tier is gone, it is never raised, unless `--worker-return-timeout-s` is 0: a worker was ready, or expected, when
        the request came. The request's own deadline ends the wait in any case. A heartbeat may bring a worker back, or
        capacity even where the reported load looks the same.
        """
        recovery = self._recovery
        placement, waits, since = None, 0, self.now()
        while placement is None:
            if self._cluster.policy.worker_return_timeout_s > 0 and not self._cluster.ready("decode"):
                recovery.tier_is_gone()
                if self.now() - since >= _GONE_S:  # A worker seen now was restarted: its time starts anew.
                    recovery.begin(self.now())
            elif recovery.gives_up(self.now()):
                raise error_for_client(refusal, self._cluster, self._placer, recovery.home)
            waits += 1
            await self.heartbeat(waits, recovery.capacity_until)
            recovery.forgive()
            placement = self._placer.choose_decode(recovery, self.now())
        return placement

    async def for_prefill(self, decode: WorkerRecord, refusal: PdserveError) -> None:
        """For a request that only prefill workers may compute: returns when one is ready.

        Raises `refusal` when none is expected, or all that are ready have failed the request.
        """
        waits, is_expected = 0, self._cluster.expects("prefill")
        while self._placer.choose_prefill(decode) is None:
            if self._cluster.ready("prefill", decode.layout) or not is_expected:
                raise refusal
            waits += 1
            await self.heartbeat(waits)
