"""When a worker should change its role: a tier without workers gets one of the other tier. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.peers.workers import Tier, WorkerRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleOrder:
    """This worker is to take this role."""

    worker: WorkerRecord
    role: Tier


class RolePolicy:
    """Looks at the ready workers again and again, and decides on one change at a time.

    Every router decides alike from the same records, and a worker that has the role already stays as it is. So routers
    need not agree on who asks.
    """

    def __init__(self, *, after_s: float, expects_prefill: bool) -> None:
        """A tier may lack a ready worker for `after_s`, since workers restart. Changes are at least that far apart."""
        self._after_s = after_s
        self._expects_prefill = expects_prefill
        #: Since when a tier has had no ready worker; absent: it has one, or has never had any, as at the start.
        self._empty_since: dict[Tier, float] = {}
        self._seen: set[Tier] = set()
        self._ordered_at = float("-inf")

    def next(self, ready: Sequence[WorkerRecord], *, is_readable: bool, now: float) -> RoleOrder | None:
        """The next change, given the ready workers of one model; None: none is due.

        While the registry is not readable, it is unknown which workers are absent, and no time counts.
        """
        tiers: tuple[Tier, ...] = ("decode", "prefill")
        present = {worker.tier for worker in ready}
        self._seen |= present
        for tier in tiers:
            if tier in present or not is_readable:
                self._empty_since.pop(tier, None)
            elif tier in self._seen:
                self._empty_since.setdefault(tier, now)
        if now < self._ordered_at + self._after_s:
            return None
        for tier in tiers:
            since = self._empty_since.get(tier)
            if since is None or now < since + self._after_s:
                continue
            candidates = [worker for worker in ready if self._may_change(worker, ready)]
            if candidates:
                self._ordered_at = now
                return RoleOrder(worker=min(candidates, key=lambda each: _preference(each, tier)), role=tier)
        return None

    def _may_change(self, worker: WorkerRecord, ready: Sequence[WorkerRecord]) -> bool:
        """Whether the worker may go to the other tier, which is empty. A last decode worker stays: it prefills, too."""
        if worker.home_tier is None:
            return False
        if worker.tier == "prefill":
            return True
        return len(ready) > 1 and (worker.home_tier == "prefill" or self._expects_prefill)


def _preference(worker: WorkerRecord, tier: Tier) -> tuple[bool, str]:
    """The order of candidates: workers that began in the tier go back to it first."""
    return worker.home_tier != tier, worker.worker_id
