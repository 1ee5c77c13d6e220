"""Where the tokens of a request come from: other workers may go on with them only if they compute the same. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from pdserve.base.errors import NoWorkers
from pdserve.base.layout import KvLayout
from pdserve.peers.workers import WorkerRecord


@dataclass(frozen=True, slots=True)
class Home:
    """KV layout and numerics class of the last decode worker that added tokens to a request; None: there was none."""

    layout: KvLayout | None = None
    numerics_class: str | None = None

    def choices(self, *, may_change: bool) -> tuple[str | None, ...]:
        """Classes to look for a worker in, the best first; None is any class."""
        if self.numerics_class is None:
            return (None,)
        return (self.numerics_class, None) if may_change else (self.numerics_class,)

    def refusal(self, ready: Collection[WorkerRecord]) -> NoWorkers | None:
        """The error when all `ready` workers are of other classes; None: some are of this one, or there are none."""
        others = sorted({worker.numerics_class for worker in ready})
        if not others or self.numerics_class is None or self.numerics_class in others:
            return None
        return NoWorkers(
            f"The decode workers of numerics class {self.numerics_class or 'unknown'} are lost, and those that are "
            f"left would compute other bits: {', '.join(other or 'unknown' for other in others)}. Retry the request, "
            "give workers the same --instruction-set and ranks, or set --on-numerics-change continue."
        )


def home_of(worker: WorkerRecord) -> Home:
    """The home of a request that this worker decodes."""
    return Home(worker.layout, worker.numerics_class)
