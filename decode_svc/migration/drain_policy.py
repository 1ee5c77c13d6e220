"""Which requests a decode worker asks to move elsewhere before it ends. Pure policy.

Requests that end in time stay. The others leave one after the other, and a few at a time where that takes too long:
steps of the worker they go to are longer while they catch up there, and all that move wait for such a step. A router
that has no other worker for a request keeps it in mind: nothing is asked twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import ceil

from pdserve.base.ids import AttemptId

#: Most requests on their way at a time, and how long one counts as such.
_MAX_AT_ONCE, _ON_ITS_WAY_S = 4, 2.0
#: What a move takes, about.
_MOVE_S = 0.4
#: Share of the time left that a request may take, at the pace of the last step, to be one that ends in time.
_SAFE_SHARE = 0.5


class DrainPolicy:
    """The requests of a worker that ends at `ends_at`; None: it does not end, and all of them leave."""

    def __init__(self, ends_at: float | None) -> None:
        self._ends_at = ends_at
        self._requested_at: dict[AttemptId, float] = {}

    @property
    def requested(self) -> Iterable[AttemptId]:
        """The requests that `next` has returned."""
        return self._requested_at

    def next(self, tokens_left: Mapping[AttemptId, int], *, step_s: float, now: float) -> list[AttemptId]:
        """The requests to ask now. `tokens_left`: the most that each running one may still have."""
        allowed_s = 0.0 if self._ends_at is None else _SAFE_SHARE * (self._ends_at - now)
        on_their_way = sum(
            attempt_id in tokens_left and now - requested_at < _ON_ITS_WAY_S
            for attempt_id, requested_at in self._requested_at.items()
        )
        # The longest first: they gain the most.
        candidates = sorted(
            (
                attempt_id
                for attempt_id, count in tokens_left.items()
                if attempt_id not in self._requested_at and count * step_s > allowed_s
            ),
            key=lambda attempt_id: -tokens_left[attempt_id],
        )
        chosen = candidates[: max(0, self._at_once(len(candidates) + on_their_way, allowed_s) - on_their_way)]
        self._requested_at.update(dict.fromkeys(chosen, now))
        return chosen

    def _at_once(self, num_left: int, allowed_s: float) -> int:
        if self._ends_at is None:
            return 1
        return min(_MAX_AT_ONCE, ceil(num_left * _MOVE_S / allowed_s)) if allowed_s > 0 else _MAX_AT_ONCE
