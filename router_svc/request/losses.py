"""Workers that are lost, and the requests of this router that they had. Pure.

A request that makes workers run out of memory meets each of their deaths. One that meets some of many deaths is not
what causes them.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from router_svc.routing.incarnation import Incarnation

#: Losses that are remembered, and requests of each.
_MAX_LOSSES = 256
_MAX_REQUESTS = 1024


@dataclass(slots=True)
class _Loss:
    at: float
    digests: set[bytes] = field(default_factory=set)


class Losses:
    """The last losses. Times are of one monotonic clock, in seconds."""

    def __init__(self) -> None:
        self._losses: OrderedDict[Incarnation, _Loss] = OrderedDict()

    def add(self, worker: Incarnation, digest: bytes | None, now: float) -> None:
        """The worker was lost, while it had this request if any."""
        loss = self._losses.setdefault(worker, _Loss(now))
        if digest is not None and len(loss.digests) < _MAX_REQUESTS:
            loss.digests.add(digest)
        if len(self._losses) > _MAX_LOSSES:
            self._losses.popitem(last=False)

    def without(self, digest: bytes, since: float) -> int:
        """How many workers were lost since then while they had no request like this one."""
        return sum(loss.at >= since and digest not in loss.digests for loss in self._losses.values())
