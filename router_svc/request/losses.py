"""Workers that are lost, and the requests of this router that they had. Pure.

A request that makes workers run out of memory meets each of their deaths, and soon. One that meets some of many deaths
is not what causes them, and neither is one that meets as many as its time on workers explains.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


class Presence:
    """For how long workers have had one request, added up over them. Times are in seconds."""

    def __init__(self) -> None:
        self._num_workers = 0
        #: Ends less starts; the stays that last have no end yet.
        self._seconds = 0.0

    @contextmanager
    def on_worker(self, clock: Callable[[], float]) -> Iterator[None]:
        """A worker has the request inside the block."""
        self._num_workers += 1
        self._seconds -= clock()
        try:
            yield
        finally:
            self._num_workers -= 1
            self._seconds += clock()

    def seconds(self, now: float) -> float:
        """The sum until now."""
        return self._seconds + self._num_workers * now


def probability_by_chance(num_with: int, num_without: int, share: float) -> float:
    """How probably `num_with` of these losses or more meet a request that causes none.

    Args:
        num_with: workers that were lost while they had the request.
        num_without: others that were lost meanwhile.
        share: of the time of all workers, that of workers with the request, 0 to 1.
    """
    total = num_with + num_without
    return math.fsum(
        math.comb(total, count) * share**count * (1.0 - share) ** (total - count)
        for count in range(num_with, total + 1)
    )
