"""How a decode worker catches up with the one that a request leaves, while that one goes on. Pure policy.

    source    | a b c d e f g h i ...        what the client has grows meanwhile
    target          | d e f                  it is given what the client has, and samples behind that
    fed again             | g h i            until it is at most a token behind: then it takes over

Each time, less is left to compute, until a step of one worker takes as long as a step of the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto

#: Tokens that the target may be behind the client when it takes over: one is sampled while another one is written.
_MAX_LAG = 1
#: Times that it is given more tokens. One that is still behind then has longer steps than the source.
_MAX_ROUNDS = 4


class Pursuit(Enum):
    """What follows the target's latest tokens."""

    #: It has not sampled a token behind what it was given.
    WAIT = auto()
    #: It gets the tokens that the client has more than it.
    FEED = auto()
    #: It is close enough: the source is left.
    TAKE_OVER = auto()


class Chase:
    """Where the target stands, by choice."""

    def __init__(self, lengths: Mapping[int, int]) -> None:
        """`lengths`: tokens of each open choice that the target starts with."""
        self._fed = dict(lengths)
        self._next = dict(lengths)
        self._rounds = 0

    def sampled(self, choice: int, next_index: int) -> None:
        """The target has sampled the tokens before `next_index`."""
        self._next[choice] = max(next_index, self._next.get(choice, 0))

    def decide(self, lengths: Mapping[int, int]) -> Pursuit:
        """What follows now that the client has so many tokens of each choice that goes on."""
        if any(self._next.get(choice, 0) <= self._fed.get(choice, 0) for choice in lengths):
            return Pursuit.WAIT
        lag = max((length - self._next[choice] for choice, length in lengths.items()), default=0)
        if lag <= _MAX_LAG or self._rounds == _MAX_ROUNDS:
            return Pursuit.TAKE_OVER
        self._rounds += 1
        return Pursuit.FEED

    def feed(self, choice: int, length: int) -> int:
        """The target is about to get the client's tokens up to `length`. Returns the position of the first one."""
        first = max(self._next.get(choice, 0), self._fed.get(choice, 0))
        self._fed[choice] = max(first, length)
        return first
