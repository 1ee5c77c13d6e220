"""Which requests a decode worker asks to move elsewhere before it ends. Pure policy.

Requests that end in time stay. The others leave one after the other, and a few at a time where that takes too long.
While requests catch up, the steps of the worker that they go to are longer, and all moving requests wait for these
steps. No request is asked twice: a router that has no other worker for it remembers that it should leave.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import ceil

from pdserve.base.ids import AttemptId

#: Maximum number of requests that move at a time, and time for which a request that was asked counts as moving.
_MAX_AT_ONCE, _ON_ITS_WAY_S = 4, 2.0
#: Approximate duration of a move.
_MOVE_S = 0.4
#: A request ends in time if it takes, at the pace of the last step, at most this share of the time that is left.
_SAFE_SHARE = 0.5


class DrainPolicy:
    """Chooses among the requests of a worker that ends at `ends_at`; None: it does not end, and all requests leave."""

    def __init__(self, ends_at: float | None) -> None:
        self._ends_at = ends_at
        self._requested_at: dict[AttemptId, float] = {}

    @property
    def requested(self) -> Iterable[AttemptId]:
        """The requests that `next` has returned."""
        return self._requested_at

    def next(self, tokens_left: Mapping[AttemptId, int], *, step_s: float, now: float) -> list[AttemptId]:
        """The requests to ask now. `tokens_left`: maximum number of tokens that each running request may still have."""
        allowed_s = 0.0 if self._ends_at is None else _SAFE_SHARE * (self._ends_at - now)
        on_their_way = sum(
            attempt_id in tokens_left and now - requested_at < _ON_ITS_WAY_S
            for attempt_id, requested_at in self._requested_at.items()
        )
        # Requests with the most tokens left come first: they gain the most.
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
