"""Which requests a decode worker asks to move elsewhere before it ends. Pure policy.

Requests that end in time stay. The others leave, a few at a time, so that copying delays no step by much. A router that
has no other worker for a request keeps it in mind: nothing is asked twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pdserve.base.ids import RequestId

#: Requests on their way at a time, and how long one counts as such.
_AT_ONCE, _ON_ITS_WAY_S = 4, 2.0
#: Share of the time left that a request may take, at the pace of the last step, to be one that ends in time.
_SAFE_SHARE = 0.5


class Leaving:
    """The requests of a worker that ends at `ends_at`."""

    def __init__(self, ends_at: float) -> None:
        self._ends_at = ends_at
        self._requested_at: dict[RequestId, float] = {}

    @property
    def requested(self) -> Iterable[RequestId]:
        """The requests that `next` has returned."""
        return self._requested_at

    def next(self, tokens_left: Mapping[RequestId, int], *, step_s: float, now: float) -> list[RequestId]:
        """The requests to ask now. `tokens_left`: the most that each running one may still have."""
        allowed_s = _SAFE_SHARE * (self._ends_at - now)
        on_their_way = sum(
            request_id in tokens_left and now - requested_at < _ON_ITS_WAY_S
            for request_id, requested_at in self._requested_at.items()
        )
        # The longest first: they gain the most.
        candidates = sorted(
            (
                request_id
                for request_id, count in tokens_left.items()
                if request_id not in self._requested_at and count * step_s > allowed_s
            ),
            key=lambda request_id: -tokens_left[request_id],
        )
        chosen = candidates[: max(0, _AT_ONCE - on_their_way)]
        self._requested_at.update(dict.fromkeys(chosen, now))
        return chosen
