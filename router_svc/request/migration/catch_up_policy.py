"""When a decode worker that follows takes over from the one that a request leaves. Pure policy.

    source  | a b c d e f g h i ...      what the client has grows meanwhile, and each token is passed on
    target        | d e f g h i ...      it samples behind what it was given, its steps at other times

While both go on, the target's next token costs the client nothing. What the client waits for is the first one after the
source is left: a step of the target, and the time by which its latest token came later than the source's.
"""

from __future__ import annotations

from collections.abc import Mapping

#: The target takes over when its latest tokens came at most this much later than the source's. The limit grows by the
#: second value with each step of the target: steps of equal length may never meet.
_LATE_S, _MORE_S = 0.005, 0.0004
#: Steps of the target after which it takes over in any case. If it is still behind, its steps are longer.
_NUM_ROUNDS = 40


class CatchUpPolicy:
    """Where the target stands, by choice. `now` is any monotonic clock, in seconds."""

    def __init__(self, lengths: Mapping[int, int]) -> None:
        """`lengths`: tokens of each open choice that the target starts with."""
        self._given = dict(lengths)
        self._next: dict[int, int] = {}
        self._came_at: dict[int, float] = {}
        self._rounds = 0

    def came(self, lengths: Mapping[int, int], now: float) -> None:
        """The client has got tokens from the source, and now has so many of each open choice."""
        for choice, length in lengths.items():
            if length > self._next.get(choice, 0):
                self._came_at[choice] = now

    def give(self, choice: int, length: int) -> int:
        """The target is about to get the client's tokens up to `length`. Returns the position of the first one."""
        first = max(self._next.get(choice, 0), self._given.get(choice, 0))
        self._given[choice] = max(first, length)
        return first

    def sampled(self, next_indices: Mapping[int, int], lengths: Mapping[int, int], now: float) -> bool:
        """The target has sampled the tokens before `next_indices`. Returns whether it takes over.

        `lengths`: tokens of each open choice that the client had before.
        """
        self._next.update(next_indices)
        self._rounds += 1
        lags = [length - self._next.get(choice, 0) for choice, length in lengths.items()]
        if self._rounds >= _NUM_ROUNDS:
            return True
        if any(lag > 0 for lag in lags):
            return False
        level = [choice for choice, lag in zip(lengths, lags, strict=True) if not lag]
        late_s = max((now - self._came_at.get(choice, now) for choice in level), default=0.0)
        return late_s <= _LATE_S + _MORE_S * self._rounds
